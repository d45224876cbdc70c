"""Rewards that differ only by rounding: of equal images, whatever the batch, and in every algorithm and mode."""

from typing import Any

import pytest
import torch
from solrl_core.model_options import read_options
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import PlainDefaults
from solrl_minis import catalog
from solrl_proto.selection import TIE_TOLERANCE, merge_ties
from solrl_trainer.algorithms.algorithm import Velocities, advantages_of, aggregated, without_spread
from solrl_trainer.algorithms.diffusionnft import DiffusionNft, DiffusionNftSettings
from solrl_trainer.algorithms.dpo import DiffusionDpo, DpoSettings
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.algorithms.training_data import ForwardBatch
from solrl_trainer.records.records import share_without_spread
from solrl_trainer.records.reward_shares import reward_shares
from solrl_trainer.rollouts.selection import choose

PROMPT = "a red circle"
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
BATCHES = (1, 7, 16)
ROUNDED = torch.tensor([[0.25, 0.25 + 3e-8, 0.25 - 3e-8, 0.25]])


def in_batches(rewards: RewardSet, name: str, image: torch.Tensor) -> torch.Tensor:
    """Scores of 24 equal images, made in three batches."""
    scores = [rewards.score([name], image.expand(n, -1, -1, -1), [PROMPT] * n, [{}] * n)[name] for n in BATCHES]
    return torch.cat(scores)[None]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def rewards(request: pytest.FixtureRequest) -> RewardSet:
    options = read_options(str(catalog.mini_sana()))
    return RewardSet.load(REWARDS, PlainDefaults(torch.device("cpu"), options), dtype=request.param)


@pytest.mark.parametrize("name", REWARDS)
def test_equal_images_differ_by_less_than_what_counts_as_rounding(rewards: RewardSet, name: str) -> None:
    """The measurement behind `TIE_TOLERANCE`, here on a CPU: three times smaller."""
    images = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    scores = torch.cat([in_batches(rewards, name, image) for image in images])
    assert without_spread(scores).all()
    off = (scores.amax(1) - scores.amin(1)).max() / scores.abs().max()
    assert off < TIE_TOLERANCE / 3
    assert not without_spread(scores.T.contiguous()).any(), "different images"


@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_no_algorithm_has_an_advantage_for_equal_images(name: str, global_std: bool) -> None:
    algorithm: Any = ALGORITHMS.find(name)
    made = algorithm(algorithm.Settings(name=name, global_std=global_std))
    alone = advantages_of(made, ROUNDED)
    assert (alone == 0).all()
    beside = advantages_of(made, torch.cat([ROUNDED, torch.tensor([[0.3, 0.2, 0.1, 0.2]])]))
    assert (beside[0] == 0).all()
    assert (beside[1].sign() == torch.tensor([1.0, 0.0, -1.0, 0.0])).all(), "0.2 is the group's mean"


def test_no_other_algorithm_sees_rounding_and_pairs_that_differ_by_it_are_tied() -> None:
    class Standardised(DiffusionDpo):
        def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
            return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-12)

    assert (advantages_of(Standardised(DpoSettings()), ROUNDED) == 0).all()
    rewards = torch.tensor([[0.9, 0.5 + 1e-7, 0.5, 0.1]])
    algorithm = DiffusionDpo(DpoSettings())
    advantages = advantages_of(algorithm, rewards)[0]
    pairs = algorithm.units(advantages, 4).flatten()
    v = torch.zeros(4, 1)
    found = algorithm.loss(ForwardBatch(v, v[:, 0], advantages[pairs], v, v), Velocities(v, {"reference": v}))
    assert found.figures["tied"] == 0.5


def test_only_rewards_within_the_tolerance_are_without_spread() -> None:
    scores = torch.cat([ROUNDED, torch.tensor([[0.1, 0.2, 0.1, 0.1]])])
    assert without_spread(scores).tolist() == [True, False]
    assert share_without_spread(scores) == 0.5
    assert not without_spread(scores * 1e-9)[1], "relative to the rewards' magnitude"
    a, b, c, d = (1 + share * TIE_TOLERANCE for share in (0, 0.5, 1.6, 2))
    assert merge_ties([a, c, d, -2.0, b]) == [b, d, d, -2.0, b]
    assert merge_ties([]) == []


GROUP = [0.20, 0.24, 0.30, 0.34]
RIGHT = torch.tensor([-1.2976, -0.5561, 0.5561, 1.2976])


@pytest.mark.parametrize(
    "other", [[0.21, 0.22, 0.31, -20000.0], [1e6, 2e6, 3e6, 4e6], [0.0] * 4], ids=["an outlier", "a scale", "nothing"]
)
def test_a_groups_advantages_depend_on_no_other_group(other: list[float]) -> None:
    plain = DiffusionNft(DiffusionNftSettings(global_std=False))
    rewards = torch.tensor([GROUP, other])
    torch.testing.assert_close(advantages_of(plain, rewards)[0], RIGHT, rtol=1e-3, atol=1e-4)
    assert not without_spread(rewards)[0]
    assert share_without_spread(rewards) == (0.5 if other[0] == 0 else 0)


def test_rewards_far_from_zero_and_beside_a_penalty_keep_their_order() -> None:
    far = torch.tensor([[1e6 + 3, 1e6 + 1, 1e6, 1e6 + 7]])
    found = advantages_of(DiffusionNft(DiffusionNftSettings(global_std=False)), far)[0]
    torch.testing.assert_close(found, torch.tensor([0.093, -0.653, -1.026, 1.586]), rtol=0.01, atol=0.001)
    assert choose([*GROUP, -1000.0, 0.25], 4) == [3, 2, 0, 4]


def test_a_difference_of_rewards_has_no_more_spread_than_they_have() -> None:
    settings = DiffusionNftSettings(global_std=False)
    rewards = {"a": ROUNDED, "b": ROUNDED.flip(1)}
    assert not advantages_of(DiffusionNft(settings), aggregated(settings, rewards, {"a": 1.0, "b": -1.0})).any()
    assert reward_shares(rewards, {"a": 1.0, "b": -1.0}) == {"a": 0, "b": 0}


def test_a_selection_does_not_depend_on_rounding() -> None:
    exact = [0.5, 0.7, 0.5, 0.3, 0.7, 0.5, 0.3, 0.5]
    noise = torch.randn(8, generator=torch.Generator().manual_seed(1)) * 1e-7
    rounded = (torch.tensor(exact) + noise).tolist()
    assert choose(rounded, 4) == choose(exact, 4)
