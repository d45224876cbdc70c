"""Rewards without their rounding, so that no algorithm trains on it. `solrl_proto.selection` defines equal rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solrl_proto.selection import levelled, rounding

if TYPE_CHECKING:
    import torch


def levelled_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [groups, kept], where those of a group that are equal up to rounding are equal."""
    tolerance = rounding(rewards.flatten().tolist())
    return rewards.new_tensor([levelled(group, tolerance) for group in rewards.tolist()])


def without_spread(rewards: torch.Tensor) -> torch.Tensor:
    """Whether all rewards of a group are equal up to rounding, bool [groups]; rewards [groups, kept]."""
    level = levelled_groups(rewards)
    return level.amax(1) == level.amin(1)


def centred(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [groups, kept] less their group's mean; 0 for those that equal it up to rounding."""
    off = rewards - rewards.mean(1, keepdim=True)
    return off.masked_fill(off.abs() <= rounding(rewards.flatten().tolist()), 0)
