"""The models and rewards that all trainers get: random weights of the true shape; on a CPU, the miniatures."""

from typing import Any

import torch
from solrl_core.families.backbone import stack
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.rewards import Reward, load_reward
from support.true_size import random_backbone
from torch import nn

from peer_drives.turns import Work


class NoEncoder(nn.Module):
    """In the place of a text encoder; a pipeline asks it for its device."""

    dtype = torch.bfloat16

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)


def loaded(work: Work, guidance: float = 1.0) -> PipelineBackbone:
    """A model with the states of the prompts, random on a GPU, and without text encoders."""
    backbone = random_backbone(work.model, work.device, guidance)
    assert isinstance(backbone, PipelineBackbone)
    encoded = {prompt: backbone.encode([prompt], guidance) for prompt in (*work.prompts, "")}
    backbone.encode = lambda prompts, *_: stack([encoded[prompt] for prompt in prompts])  # type: ignore[method-assign]
    for name in backbone.text_encoders:
        backbone.parts[name] = NoEncoder(work.device)
        setattr(backbone.pipeline, name, backbone.parts[name])
    return backbone


def reward_of(work: Work, backbone: PipelineBackbone) -> Reward:
    return brightness if work.learning is None else load_reward(work.learning.reward, backbone)


def brightness(images: torch.Tensor, *_: Any) -> torch.Tensor:
    """Mean of each image [B, C, H, W] → [B]: costs nothing."""
    return images.float().flatten(1).mean(1)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
