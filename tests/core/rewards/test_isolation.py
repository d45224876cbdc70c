"""What a reward does to its arguments, its scores and the process reaches neither other rewards nor the run."""

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import PlainDefaults

TEXTS = ["one", "two"]


def images_of(count: int = 2) -> torch.Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def brightness(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    lengths = [len(prompt) + len(one) for prompt, one in zip(prompts, metadata, strict=True)]
    return images.mean((1, 2, 3)) + torch.tensor(lengths)


def test_what_a_reward_writes_reaches_no_other_reward_and_not_the_caller() -> None:
    def writes(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        images.sub_(0.5).div_(0.25)
        prompts[0] += " and more"
        metadata[0]["seen"] = True
        metadata[1]["tags"].append("seen")
        return images.mean((1, 2, 3))

    images, texts, metadata = images_of(), list(TEXTS), [{}, {"tags": []}]
    rewards = RewardSet({"writes": writes, "brightness": brightness})
    expected = brightness(images, texts, metadata)
    found = rewards.score(rewards.names, images, texts, metadata)
    assert torch.equal(found["brightness"], expected)
    assert torch.equal(images, images_of())
    assert (texts, metadata) == (TEXTS, [{}, {"tags": []}])


def test_an_image_is_blamed_for_a_failure_of_its_own_only() -> None:
    def fails_when_dark(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        assert images.min() >= 0, "written to before"
        images.neg_()
        raise ValueError("no such luck")

    with pytest.raises(RuntimeError, match="image 0 of prompt 'one': ValueError: no such luck"):
        RewardSet({"a": fails_when_dark}).score(["a"], images_of(), TEXTS, [{}, {}])


def test_scores_stay_although_a_reward_reuses_the_tensor_that_it_returns() -> None:
    buffer = torch.zeros(2)

    def counts(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return buffer.add_(1)

    rewards = RewardSet({"counts": counts})
    first, second = (rewards.score(["counts"], images_of(), TEXTS, [{}, {}])["counts"] for _ in range(2))
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])


def every_state() -> Any:
    return (
        (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
        (torch.get_default_device(), os.getcwd()),
        (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()),
    )


def change_every_state() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    torch.set_default_device("meta")
    os.chdir("/")


class ChangesEveryState:
    def __init__(self, *, device: str = "cpu", fails: bool = False) -> None:
        change_every_state()
        self.fails = fails

    def __call__(self, images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        change_every_state()
        torch.set_grad_enabled(True)
        if self.fails:
            raise ValueError("no such luck")
        return images.mean((1, 2, 3))


def test_loading_and_calling_a_reward_changes_no_process_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changes_as_imported.py").write_text(f"from {__name__} import *\nchange_every_state()\nx = brightness")
    monkeypatch.syspath_prepend(tmp_path)
    before, name = every_state(), f"{__name__}:ChangesEveryState"
    defaults = PlainDefaults(torch.device("cpu"))
    rewards = RewardSet.load([name, "changes_as_imported:x"], defaults)
    rewards.score(rewards.names, images_of(), TEXTS, [{}, {}])
    assert every_state() == before
    failing = RewardSet.load([name], defaults, {name: {"fails": True}})
    with pytest.raises(RuntimeError, match="no such luck"):
        failing.score([name], images_of(), TEXTS, [{}, {}])
    assert every_state() == before
