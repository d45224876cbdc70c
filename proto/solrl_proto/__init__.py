"""The wire contract between trainer and rollout service: messages, identifiers, problems, noise constants.

This package knows nothing of torch, FastAPI or Redis: it can be installed alone by any client.
"""

from solrl_proto.adapters import AdapterInfo, AdapterList, RunList
from solrl_proto.identifiers import Digest, ModelName, RunName, Seed, TenantName, Version
from solrl_proto.models import ModelInfo, ModelList, NoiseContract, PrecisionInfo, RankFidelity
from solrl_proto.problems import Problem
from solrl_proto.rollouts import (
    AdapterRef,
    Candidates,
    EndLine,
    ErrorLine,
    Plan,
    PromptItem,
    RewardSpec,
    RolloutAnswer,
    RolloutGroup,
    RolloutRequest,
    RolloutTimings,
    Served,
    StartLine,
    StreamLine,
)
from solrl_proto.status import IterationReport, Point, RunDetail, Samples, StatusAnswer

__all__ = [
    "AdapterInfo",
    "AdapterList",
    "AdapterRef",
    "Candidates",
    "Digest",
    "EndLine",
    "ErrorLine",
    "IterationReport",
    "ModelInfo",
    "ModelList",
    "ModelName",
    "NoiseContract",
    "Plan",
    "Point",
    "PrecisionInfo",
    "Problem",
    "PromptItem",
    "RankFidelity",
    "RewardSpec",
    "RolloutAnswer",
    "RolloutGroup",
    "RolloutRequest",
    "RolloutTimings",
    "RunDetail",
    "RunList",
    "RunName",
    "Samples",
    "Seed",
    "Served",
    "StartLine",
    "StatusAnswer",
    "StreamLine",
    "TenantName",
    "Version",
]
