"""Adapters with random weights, the header of their digest, and versions of them as a store has them."""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_proto.adapters import AdapterInfo, adapter_digest


def random_adapter(
    layout: Mapping[str, tuple[int, int]], seed: int, size: float = 0.2, rank: int = 2, alpha: float | None = None
) -> Adapter:
    """An adapter of all LoRA targets.

    Args:
        layout: target → (out, in).
        seed: of the weights.
        size: standard deviation of the weights.
        rank: of both parts of each target.
        alpha: by default the rank.
    """
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outs, ins) in layout.items():
        tensors[lora_a_key(module)] = torch.randn(rank, ins, generator=draw) * size
        tensors[lora_b_key(module)] = torch.randn(outs, rank, generator=draw) * size
    return Adapter(rank, float(rank) if alpha is None else alpha, tensors)


def content_digest(body: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def stored_version(body: bytes, **named: Any) -> tuple[AdapterInfo, bytes]:
    """A version with any content, as a store is given it; `named` are fields of its `AdapterInfo`."""
    fields = {"model": "mini", "digest": adapter_digest(body), "size": len(body), "modules": 2, "rank": 2, "alpha": 4}
    return AdapterInfo(**fields | named), body
