"""GDPO: each reward is normalised within its group, then weighted and summed. Sources: Liu et al., arXiv 2601.05242;
NVlabs/GDPO; and the processor of advantages in X-GenGroup/Flow-Factory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from solrl_trainer.algorithms.algorithm import AlgorithmSettings, group_advantages
from solrl_trainer.algorithms.rounding import levelled_groups

if TYPE_CHECKING:
    import torch


def normalised(rewards: torch.Tensor) -> torch.Tensor:
    """A reward [groups, kept] less its group's mean, over its group's deviation; 0 in a group without spread.

    A group's values depend on no other group.
    """
    import torch

    return torch.cat([group_advantages(levelled_groups(group), global_std=False) for group in torch.split(rewards, 1)])


def aggregated(
    settings: AlgorithmSettings,
    scores: torch.Tensor,
    rewards: Mapping[str, torch.Tensor],
    weights: Mapping[str, float | torch.Tensor],
) -> torch.Tensor:
    """Values [groups, kept] of which an algorithm's advantages are computed.

    Args:
        settings: say how several rewards are combined.
        scores: weighted sums of the rewards [groups, kept].
        rewards: reward → its values [groups, kept]; NaN in a group of weight 0.
        weights: trained reward → its weight, or [groups, 1].
    """
    if settings.aggregation == "sum":
        return scores
    import torch

    return torch.stack([weight * normalised(rewards[name].nan_to_num()) for name, weight in weights.items()]).sum(0)
