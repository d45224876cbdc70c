"""Coefficients-preserving steps with log-probabilities, and FlowGRPO's loss on them, against IamCreateAI/FlowCPS."""

from functools import partial
from typing import Any

from parity import flowgrpo

REPOSITORY = "https://github.com/IamCreateAI/FlowCPS"
_LOSS = ("scripts/train_flux_kontext.py",)
"""The one that divides the divergence by the variance, as FlowGRPO's later scripts do."""
CASES: dict[str, dict[str, Any]] = {
    "paper": {"sde": "cps", "eta": 0.8, "kl_weight": 0.04},
    "wide": {"sde": "cps", "eta": 0.5, "kl_weight": 1.0, "clip_range": 0.1},
}
"""Settings of each comparison."""


ours = flowgrpo.ours
theirs = partial(flowgrpo.theirs, loss=_LOSS)
