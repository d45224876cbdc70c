"""Rewards by name. This module does not import torch, unlike `solrl_core.rewards`: settings are checked without it."""

from typing import Any

from solrl_core.registry import Registry

REWARDS: Registry[Any] = Registry(
    "reward",
    "solrl.rewards",
    {
        "aesthetic": "solrl_core.rewards.aesthetic:Aesthetic",
        "clipscore": "solrl_core.rewards.clipscore:ClipScore",
        "geneval": "solrl_core.rewards.geneval:GenEval",
        "hpsv2": "solrl_core.rewards.hpsv2:HpsV2",
        "hpsv3": "solrl_core.rewards.hpsv3:HpsV3",
        "imagereward": "solrl_core.rewards.imagereward:ImageReward",
        "motion": "solrl_core.rewards.motion:Motion",
        "ocr": "solrl_core.rewards.ocr:Ocr",
        "pickscore": "solrl_core.rewards.clipscore:PickScore",
    },
    wrong=lambda reward: None if callable(reward) else "a function of images, prompts and metadata, or a class of such",
)
"""Reward functions, and classes that construct them."""
