"""Blocks of the trained transformer: one graph for all policies with an adapter, activations kept or recomputed."""

from collections.abc import Sequence
from typing import Any

import torch
from solrl_core.families import Backbone
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint


class TrainedBlock(nn.Module):
    """A transformer block in training.

    Attributes:
        block: the block, compiled on a GPU.
        recomputed: the backward pass computes the block's activations anew, rather than keep them.
        discarding: the block runs as for a gradient, but keeps nothing of it. A compiler fuses a pass without gradient
            differently, so that equal weights would give different numbers.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.recomputed = False
        self.discarding = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return value of the block."""
        if self.discarding:
            with torch.enable_grad():
                return tree_map(_detached, self.block(*args, **kwargs))
        if self.recomputed and torch.is_grad_enabled():
            return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return self.block(*args, **kwargs)


def wrap_blocks(transformer: nn.Module, backbone: Backbone) -> list[TrainedBlock]:
    """Put a `TrainedBlock` around each block, in place; returned in the order in which they run."""
    blocks = []
    for name in backbone.blocks:
        parent = transformer.get_submodule(name)
        for index, block in list(parent.named_children()):
            blocks.append(TrainedBlock(block))
            setattr(parent, index, blocks[-1])
    return blocks


def recompute_first(blocks: Sequence[TrainedBlock], count: int) -> None:
    """Recompute the first `count` blocks; of the others, activations are kept.

    Those of the last blocks are freed first, which makes room for what is recomputed.
    """
    for index, block in enumerate(blocks):
        block.recomputed = index < count


def _detached(x: Any) -> Any:
    """A tensor without its graph that still asks for a gradient, if it did: compiled code is chosen by that, too."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
