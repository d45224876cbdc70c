"""Random weights of the reduced models, and their files."""

from pathlib import Path

import torch
from torch import nn


def randomise(module: nn.Module, seed: int) -> None:
    """Set random weights, representable in float16, that make scores differ between images."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim >= 2:
            noise = noise * (0.5 if "embed" in name else 1.6 / weight[0].numel() ** 0.5)
        else:
            noise = 0.1 * noise + (1.0 if "weight" in name and ("ln" in name or "norm" in name.lower()) else 0.0)
        weight.data = noise.half().float()


def save(module: nn.Module, path: Path, wrapped: bool) -> None:
    """Write a state dict in float16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {k: v.half() if v.is_floating_point() else v for k, v in module.state_dict().items()}
    torch.save({"state_dict": state} if wrapped else state, path)
