"""The wire contract between trainer and rollout service: messages, identifiers, problems, noise constants.

This package knows nothing of torch, FastAPI or Redis: it can be installed alone by any client.
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
