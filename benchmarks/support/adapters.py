"""Adapters with random weights."""

from collections.abc import Mapping

import torch
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key


def random_adapter(layout: Mapping[str, tuple[int, int]], seed: int, *, rank: int, size: float) -> Adapter:
    """An adapter of all LoRA targets, with an alpha of its rank.

    Args:
        layout: target → (out, in).
        seed: of the weights.
        rank: of both parts of each target.
        size: standard deviation of the weights.
    """
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outs, ins) in layout.items():
        tensors[lora_a_key(module)] = torch.randn(rank, ins, generator=draw) * size
        tensors[lora_b_key(module)] = torch.randn(outs, rank, generator=draw) * size
    return Adapter(rank, float(rank), tensors)
