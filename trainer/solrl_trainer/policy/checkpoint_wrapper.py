"""Transformer blocks in training: one compiled graph for both adapters; optional activation checkpointing."""

from collections.abc import Sequence
from typing import Any

import torch
from solrl_core.families import Backbone
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint


class CheckpointWrapper(nn.Module):
    """A transformer block in training.

    Attributes:
        block: the block, compiled on a GPU.
        checkpointed: activation checkpointing: the backward pass recomputes activations, which are not kept.
        discarding: the block runs in gradient mode, but its graph is discarded. A compiler fuses a pass without
            gradient differently, and equal weights would then give different numbers.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.checkpointed = False
        self.discarding = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return value of the block."""
        if self.discarding:
            with torch.enable_grad():
                return tree_map(_detached, self.block(*args, **kwargs))
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return self.block(*args, **kwargs)


def wrap_blocks(transformer: nn.Module, backbone: Backbone) -> list[CheckpointWrapper]:
    """Wrap each block in a `CheckpointWrapper`, in place; return these in execution order."""
    blocks = []
    for name in backbone.blocks:
        parent = transformer.get_submodule(name)
        for index, block in list(parent.named_children()):
            blocks.append(CheckpointWrapper(block))
            setattr(parent, index, blocks[-1])
    return blocks


def checkpoint_first(blocks: Sequence[CheckpointWrapper], count: int) -> None:
    """Use activation checkpointing in the first `count` blocks, and in no others.

    The backward pass frees the last blocks' activations first, which makes room for recomputed ones.
    """
    for index, block in enumerate(blocks):
        block.checkpointed = index < count


def _detached(x: Any) -> Any:
    """A tensor without its graph but with its `requires_grad`, by which compiled code is selected, too."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
