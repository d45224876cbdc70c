"""Coefficients-preserving steps with log-probabilities, and FlowGRPO's loss on them, against IamCreateAI/FlowCPS."""

from typing import Any

import torch

from parity import flowgrpo
from parity.published import Published

REPOSITORY = "https://github.com/IamCreateAI/FlowCPS"
_LOSS = ("scripts/train_flux_kontext.py",)
"""The one that divides the divergence by the variance, as FlowGRPO's later scripts do."""
CASES: dict[str, dict[str, Any]] = {
    "paper": {"sde": "cps", "eta": 0.8, "kl_weight": 0.04},
    "wide": {"sde": "cps", "eta": 0.5, "kl_weight": 1.0, "clip_range": 0.1},
}
"""Settings of each comparison."""


def ours() -> dict[str, torch.Tensor]:
    """Values of this project."""
    return flowgrpo.ours(CASES)


def theirs(published: Published) -> dict[str, torch.Tensor]:
    """Values of the public code."""
    return flowgrpo.theirs(published, CASES, _LOSS)
