"""The wire contract between trainer and rollout service: messages, identifiers, problems, noise constants.

This package needs no torch, FastAPI or Redis: any client can install it alone.
"""

from solrl_proto.adapters import AdapterInfo
from solrl_proto.models import ModelInfo
from solrl_proto.problems import Problem
from solrl_proto.rollouts import (
    AdapterRef,
    Candidates,
    Plan,
    PromptItem,
    RewardSpec,
    RolloutAnswer,
    RolloutGroup,
    RolloutRequest,
    RolloutTimings,
    Served,
)

__all__ = [
    "AdapterInfo",
    "AdapterRef",
    "Candidates",
    "ModelInfo",
    "Plan",
    "Problem",
    "PromptItem",
    "RewardSpec",
    "RolloutAnswer",
    "RolloutGroup",
    "RolloutRequest",
    "RolloutTimings",
    "Served",
]
