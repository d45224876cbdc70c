"""Rewards: what RewardSet gives and refuses, what a reward demands of prompts, and the trial on two grey images."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from solrl_core.errors import RewardError
from solrl_core.families import Backbone
from solrl_core.model_options import ModelOptions
from solrl_core.reward_registry import REWARDS
from solrl_core.rewards import Reward, RewardSet, load_reward
from solrl_core.rewards.clipscore import ClipScore
from solrl_core.rewards.hpsv3 import HpsV3
from solrl_core.rewards.ocr import Ocr
from solrl_core.rewards.reward import PlainDefaults, checks_prompts, first_fault, prompt_fault, weighted_sum
from solrl_core.rewards.trial import try_rewards
from tests.core.rewards.reward_helpers import CLIP, HPSV2, IMAGEREWARD


def giving(values: Any) -> Reward:
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        found: torch.Tensor = values(images) if callable(values) else values
        return found

    return reward


IMAGES = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TEXTS = ["one", "two", "three"]


def scored(**rewards: Reward) -> dict[str, torch.Tensor]:
    return RewardSet(rewards).score(list(rewards), IMAGES, TEXTS, [{}] * 3)


def test_scores_come_by_name_and_the_weighted_sum_covers_those_named() -> None:
    found = scored(a=giving(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)), b=giving(lambda x: x.mean((1, 2, 3))))
    assert list(found) == ["a", "b"]
    assert all(values.dtype == torch.float32 for values in found.values())
    assert found["a"].tolist() == [1, 2, 3]
    assert torch.allclose(found["b"], IMAGES.mean((1, 2, 3)))
    scores = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0, 20.0]), "c": torch.full((2,), 99.0)}
    assert weighted_sum(scores, {"a": 2.0, "b": -0.5}).tolist() == [-3.0, -6.0]


def test_a_failing_reward_is_named_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    def fails(images: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no such luck")

    where = rf"\(test_reward_set.py:{fails.__code__.co_firstlineno + 1}\)"
    with pytest.raises(RewardError, match=rf"'b' failed on image 0 of .*'one': ZeroDivisionError: .* luck {where}"):
        scored(a=giving(torch.zeros(3)), b=giving(fails))
    (record,) = caplog.records
    assert "Traceback" in caplog.text
    assert 'raise ZeroDivisionError("no such luck")' in caplog.text
    assert record.getMessage() == "reward 'b' failed on image 0 of prompt 'one'"


def test_a_failure_in_a_package_is_placed_where_the_reward_calls_it() -> None:
    def fails(images: torch.Tensor) -> torch.Tensor:
        return json.loads("{")

    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"JSONDecodeError: .*\(test_reward_set.py:{line}\)"):
        scored(b=giving(fails))
    with pytest.raises(RewardError, match=r"TypeError: .*takes 1 positional argument but 3 were given$"):
        scored(b=lambda images: images)  # type: ignore[arg-type, misc]


def raising(error: BaseException) -> Reward:
    def fails(images: torch.Tensor) -> torch.Tensor:
        raise error

    return giving(fails)


def test_ctrl_c_is_the_main_threads_only_and_running_out_of_memory_no_reward_error() -> None:
    with pytest.raises(KeyboardInterrupt):
        scored(b=raising(KeyboardInterrupt()))
    with ThreadPoolExecutor(1) as other, pytest.raises(RewardError, match=r"'b' failed .*KeyboardInterrupt"):
        other.submit(scored, b=raising(KeyboardInterrupt())).result()
    with pytest.raises(torch.OutOfMemoryError):
        scored(b=raising(torch.OutOfMemoryError("too many")))


def test_the_image_or_the_batch_that_a_reward_fails_on_is_named() -> None:
    def fails(images: torch.Tensor) -> torch.Tensor:
        if bool((images == IMAGES[1]).flatten(1).all(1).any()):
            raise ZeroDivisionError("no such luck")
        return torch.zeros(len(images))

    with pytest.raises(RuntimeError, match="'b' failed on image 1 of prompt 'two': ZeroDivisionError: no such luck"):
        scored(b=giving(fails))

    def too_many(images: torch.Tensor) -> torch.Tensor:
        if len(images) > 2:
            raise MemoryError("too many")
        return torch.zeros(len(images))

    with pytest.raises(RuntimeError, match="'b' failed on 3 images: MemoryError: too many"):
        scored(b=giving(too_many))


@dataclass(frozen=True)
class Above:
    """A reward with an option and without a digest of its own."""

    threshold: float = 0.5
    device: str = "cpu"

    def __call__(self, images: torch.Tensor, prompts: object, metadata: object) -> torch.Tensor:
        return (images > self.threshold).float().mean((1, 2, 3))


def test_the_digest_of_a_class_covers_its_options(backbone: Backbone) -> None:
    name, digests = f"{__name__}:Above", []
    for options in ({}, {"threshold": 0.5}, {"threshold": 0.5, "device": "cpu"}, {"threshold": 1}, {"threshold": 1.0}):
        rewards = RewardSet.load([name], backbone, {name: options})
        digests.append(rewards.digests()[f"reward:{name}"])
    assert digests[0] == digests[1] == digests[2] != digests[3] == digests[4]


def test_each_reward_is_loaded_once_and_digested(backbone: Backbone) -> None:
    rewards = RewardSet.load(["verifier", "clipscore", "verifier"], backbone)
    assert rewards.names == ("verifier", "clipscore")
    digests = rewards.digests()
    assert digests.keys() == {"reward:verifier", "reward:clipscore"}
    assert digests["reward:clipscore"] == ClipScore(CLIP).digest
    assert digests["reward:verifier"].startswith("sha256:")


def test_options_of_built_in_rewards_come_from_the_model(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "clipscore": {"model": CLIP, "batch_size": 5, "dtype": "bfloat16"},
        "pickscore": {"model": CLIP},
        "hpsv2": HPSV2,
        "imagereward": IMAGEREWARD,
    }
    monkeypatch.setattr(backbone, "options", replace(backbone.options, rewards=given))
    rewards = RewardSet.load(list(given), backbone)
    assert set(given) <= set(REWARDS.names())
    images = torch.rand(2, 3, 50, 64, generator=torch.Generator().manual_seed(0))
    scores = rewards.score(list(given), images, ["one", "two"], [{}] * 2)
    assert list(scores) == list(given)
    assert len(set(rewards.digests().values())) == 4
    found = load_reward("clipscore", backbone)
    assert isinstance(found, ClipScore)
    assert found._batch_size == 5


def test_weights_have_the_given_dtype_unless_options_name_one(backbone: Backbone) -> None:
    def dtype_of(options: dict[str, Any], dtype: str | None) -> torch.dtype:
        found = load_reward("clipscore", backbone, options, dtype=dtype)
        assert isinstance(found, ClipScore)
        return next(found._model.parameters()).dtype

    assert dtype_of({}, None) == torch.float32
    assert dtype_of({}, "bfloat16") == torch.bfloat16
    assert dtype_of({"dtype": "float32"}, "bfloat16") == torch.float32
    cache: dict[str, Reward] = {}
    for dtype in (None, "bfloat16"):
        RewardSet.load(["clipscore", "verifier"], backbone, loaded=cache, dtype=dtype)
    assert len(cache) == 4


def test_options_override_the_models_and_must_be_known(backbone: Backbone) -> None:
    with pytest.raises(OSError, match=r"'clipscore'.*/nowhere"):
        RewardSet.load(["clipscore"], backbone, {"clipscore": {"model": "/nowhere"}})
    with pytest.raises(ValueError, match="expected some of the loaded rewards: \\['verifier'\\]"):
        RewardSet.load(["verifier"], backbone, {"clipscore": {"batch_size": 2}})
    with pytest.raises(ValueError, match="a class whose `__init__` takes them"):
        RewardSet.load(["verifier"], backbone, {"verifier": {"batch_size": 2}})
    small = RewardSet.load(["clipscore"], backbone, {"clipscore": {"batch_size": 2}})
    assert small.names == ("clipscore",)


@pytest.mark.parametrize(("stated", "found"), [(30.0, 30.0), (float("inf"), 86_400.0), (0, None), (None, None)])
def test_a_reward_s_time_for_an_answer_is_bounded_and_may_be_none(stated: float | None, found: float | None) -> None:
    assert RewardSet({"a": Mock(max_latency_s=stated)}).max_latency_s("a") == found


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
    assert fault.startswith("its check fails: KeyError: 'place' (test_reward_set.py:")
    prompts = [("the sea", {"place": "sea"}), ("a house", {"place": "sea"})]
    assert first_fault(reward, prompts) == "of prompt 'a house', it lacks 'sea'"
    assert first_fault(reward, prompts[:1]) is None


def test_loaded_and_built_in_rewards_are_checked() -> None:
    loaded = RewardSet({"a": Constructed(), "b": lambda images, prompts, metadata: images})
    assert loaded.first_fault("a", [("a house", {"place": "sea"})]) == "of prompt 'a house', it lacks 'sea'"
    assert loaded.first_fault("b", [("a house", {})]) is None
    assert "no text to render" in (prompt_fault(Ocr, "a sign", {}) or "")
    assert "<|image_pad|>" in (prompt_fault(HpsV3, "a <|image_pad|>", {}) or "")
    assert prompt_fault(HpsV3, "a fox", {}) is None


CPU = PlainDefaults(torch.device("cpu"), ModelOptions(height=16, width=32))


def of_metadata(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    return torch.tensor([float(one["want"]) for one in metadata])


def test_a_reward_of_metadata_is_judged_by_the_prompts_or_not_at_all() -> None:
    rewards = RewardSet({"a": of_metadata})
    assert try_rewards(rewards, CPU) == []
    assert try_rewards(rewards, CPU, prompts_of=lambda name: [("one", {"want": 3})]) == ["a"]
    with pytest.raises(RewardError, match=r"it failed on image 1 of prompt 'two': KeyError: 'want'"):
        try_rewards(rewards, CPU, prompts_of=lambda name: [("one", {"want": 3}), ("two", {})])

    @checks_prompts(lambda text, metadata: metadata["want"])
    def demanding(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return of_metadata(images, prompts, metadata)

    assert try_rewards(RewardSet({"a": demanding}), CPU) == []


def test_a_reward_refused_without_prompts_is_told_how_to_demand_metadata() -> None:
    def no_kernel(images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    for values in (torch.full((2,), torch.nan), lambda images: images.lower(), no_kernel):
        with pytest.raises(RewardError, match=r"cannot be used: .*; if it needs metadata, mark it by checks_prompts"):
            try_rewards(RewardSet({"a": giving(values)}), CPU)


def test_a_reward_of_clips_gets_clips() -> None:
    def motion(clips: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        count, frames, *_ = clips.shape
        assert (count, frames > 1, clips.ndim) == (2, True, 5)
        return clips.mean((1, 2, 3, 4))

    motion.takes_clips = True  # type: ignore[attr-defined]
    assert try_rewards(RewardSet({"motion": motion}), CPU) == ["motion"]


def test_a_reward_may_demand_a_size_unless_its_prompts_are_known(caplog: pytest.LogCaptureFixture) -> None:
    def of_64(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        if images.shape[-2:] != (64, 64):
            raise ValueError("expected 64 x 64")
        return images.mean((1, 2, 3))

    rewards = RewardSet({"a": of_64})
    assert try_rewards(rewards, PlainDefaults(CPU.device, ModelOptions(height=64, width=64))) == ["a"]
    with pytest.raises(RewardError, match="expected 64 x 64"):
        try_rewards(rewards, CPU, prompts_of=lambda name: [("one", {})])
    assert try_rewards(rewards, CPU) == []
    assert "it is used all the same" in caplog.messages[-1]
    with pytest.raises(RewardError, match="object is not callable"):
        try_rewards(RewardSet({"a": 3}), CPU)  # type: ignore[dict-item]
