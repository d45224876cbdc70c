"""What a reward demands of prompts: how it says so, and how prompts are checked."""

from collections.abc import Mapping
from typing import Any

import pytest
from solrl_core.rewards import RewardSet
from solrl_core.rewards.hpsv3 import HpsV3
from solrl_core.rewards.ocr import Ocr
from solrl_core.rewards.reward import checks_prompts, first_fault, prompt_fault


def needs_place(text: str, metadata: Mapping[str, Any]) -> None:
    if metadata["place"] not in text:
        raise ValueError(f"it lacks {metadata['place']!r}")


@checks_prompts(needs_place)
def function(images: Any, prompts: Any, metadata: Any) -> Any:
    return images


@checks_prompts(needs_place)
class Constructed:
    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return images


@pytest.mark.parametrize("reward", [function, Constructed, Constructed()], ids=["function", "class", "instance"])
def test_text_and_metadata_are_checked(reward: Any) -> None:
    assert prompt_fault(reward, "a house by the sea", {"place": "sea"}) is None
    assert prompt_fault(reward, "a house", {"place": "sea"}) == "it lacks 'sea'"
    fault = prompt_fault(reward, "a house", {})
    assert fault.startswith("its check fails: KeyError: 'place' (test_prompt_checks.py:")
    prompts = [("the sea", {"place": "sea"}), ("a house", {"place": "sea"})]
    assert first_fault(reward, prompts) == "of prompt 'a house', it lacks 'sea'"
    assert first_fault(reward, prompts[:1]) is None


def test_loaded_rewards_are_checked_as_their_classes() -> None:
    loaded = RewardSet({"a": Constructed(), "b": lambda images, prompts, metadata: images})
    assert loaded.first_fault("a", [("a house", {"place": "sea"})]) == "of prompt 'a house', it lacks 'sea'"
    assert loaded.first_fault("b", [("a house", {})]) is None


def test_built_in_rewards_say_what_they_demand() -> None:
    assert "no text to render" in (prompt_fault(Ocr, "a sign", {}) or "")
    assert "<|image_pad|>" in (prompt_fault(HpsV3, "a <|image_pad|>", {}) or "")
    assert prompt_fault(HpsV3, "a fox", {}) is None
