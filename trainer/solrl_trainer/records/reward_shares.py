"""Shares of the spread of the trained score: a run hardly optimises a reward with a small share."""

import logging
from collections.abc import Mapping

import torch

from solrl_trainer.algorithms.algorithm import merge_group_ties

logger = logging.getLogger(__name__)

SMALL = 0.05
"""A reward with a smaller share hardly moves the weighted sum."""


def reward_shares(rewards: Mapping[str, torch.Tensor], weights: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
    """Share of each trained reward: |weight| × its mean standard deviation within a prompt, over the sum of all.

    Zeros if all rewards are constant within each prompt. The rewards are [groups, kept], NaN in a group that does not
    have one; the weights are of the trained ones, each also [groups, 1].
    """
    spreads = {name: float((weight * _spreads(rewards[name])).abs().mean()) for name, weight in weights.items()}
    total = sum(spreads.values())
    return {name: spread / total if total else 0.0 for name, spread in spreads.items()}


def log_shares(shares: Mapping[str, float]) -> None:
    """Log the shares of several rewards, and name rewards that hardly move the sum."""
    if len(shares) > 1:
        logger.info(f"shares of the spread of the weighted sum: {shares_text(shares)}")
    for name, share in shares.items():
        if not share:
            logger.warning(f"reward {name!r} is equal for all images of each prompt, so nothing is learned from it")
        elif share < SMALL:
            logger.warning(
                f"reward {name!r} has less than {100 * SMALL:g} % of the spread of the weighted sum, so it is hardly "
                "trained: give it a larger weight in rewards, or omit it"
            )


def shares_text(shares: Mapping[str, float]) -> str:
    """The shares in per cent, as in "clipscore 96.3 %, my_rewards:redness 3.7 %"."""
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())


def _spreads(values: torch.Tensor) -> torch.Tensor:
    """Standard deviation within each prompt [groups, 1]; 0 for NaN, and for values that are equal up to rounding."""
    return merge_group_ties(values.nan_to_num().double()).std(1, correction=0, keepdim=True)
