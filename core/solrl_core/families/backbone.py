"""Prompt embeddings of a backbone."""

from collections.abc import Sequence

import torch
from torch import Tensor

Conditioning = dict[str, Tensor]
"""Prompt embeddings: named tensors whose first axis is the prompt."""


def stack(conditionings: Sequence[Conditioning]) -> Conditioning:
    """Concatenate several conditionings along the prompt axis."""
    return {name: torch.cat([c[name] for c in conditionings]) for name in conditionings[0]}
