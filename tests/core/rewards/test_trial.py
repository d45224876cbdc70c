"""Rewards are tried on two grey images before a model is loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from solrl_core.errors import RewardError
from solrl_core.model_options import ModelOptions
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import PlainDefaults, checks_prompts
from solrl_core.rewards.trial import try_rewards

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


def test_a_reward_of_clips_gets_clips() -> None:
    def motion(clips: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        count, frames, *_ = clips.shape
        assert (count, frames > 1, clips.ndim) == (2, True, 5)
        return clips.mean((1, 2, 3, 4))

    motion.takes_clips = True  # type: ignore[attr-defined]
    assert try_rewards(RewardSet({"motion": motion}), CPU) == ["motion"]


def test_a_reward_may_demand_a_size_unless_it_is_known(caplog: pytest.LogCaptureFixture) -> None:
    def of_64(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        if images.shape[-2:] != (64, 64):
            raise ValueError("expected 64 x 64")
        return images.mean((1, 2, 3))

    rewards = RewardSet({"a": of_64})
    assert try_rewards(rewards, PlainDefaults(CPU.device, ModelOptions(height=64, width=64))) == ["a"]
    with pytest.raises(RewardError, match="expected 64 x 64"):
        try_rewards(rewards, CPU)
    assert try_rewards(rewards, PlainDefaults(CPU.device), side=None) == []
    assert "it is used all the same" in caplog.messages[-1]
    with pytest.raises(RewardError, match="object is not callable"):
        try_rewards(RewardSet({"a": 3}), PlainDefaults(CPU.device), side=None)  # type: ignore[dict-item]
