"""Z-Image's transformer blocks for a GPU: diffusers' arithmetic in fewer passes over memory.

Layers that share an input share its quantisation. Positions are rotated with real numbers: compilers generate code
for real numbers, but not for complex ones.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.kernels import attend
from solrl_core.precision.fp8 import project
from solrl_core.precision.fuse import FusedBlock, image_layers

_MASKED = -10000.0
"""Added to the logits of padding."""


class RealAngles:
    """Z-Image's position embedding with its complex numbers as pairs of real ones."""

    def __init__(self, embedder: Callable[[Tensor], Tensor]) -> None:
        self._embedder = embedder

    def __call__(self, ids: Tensor) -> Tensor:
        """Cosines and sines, float32 [N, D/2, 2], at the positions `ids` [N, 3]."""
        return torch.view_as_real(self._embedder(ids))


class ZImageFusedBlock(FusedBlock):
    """Fused `ZImageTransformerBlock` of diffusers."""

    def __init__(self, block: Any) -> None:
        super().__init__(block)
        self.modulation: bool = block.modulation

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        freqs_cis: Tensor,
        adaln_input: Tensor | None = None,
        *_: Tensor | None,
    ) -> Tensor:
        """Tokens [B, S, C] after the block.

        Args:
            x: [B, S, C].
            attn_mask: bool [B, S], False for padding; None for rows of equal length.
            freqs_cis: angles from `RealAngles`, float32 [B, S, D/2, 2].
            adaln_input: [B, E], for blocks with modulation.
        """
        scale, gate, ff_scale, ff_gate = self._modulations(adaln_input)
        out = self._attend(self.attention_norm1(x) * scale, attn_mask, freqs_cis)
        x = x + gate * self.attention_norm2(out)
        forward = self.feed_forward
        wide, other = project([forward.w1, forward.w3], self.ffn_norm1(x) * ff_scale)
        result: Tensor = x + ff_gate * self.ffn_norm2(forward.w2(F.silu(wide) * other))
        return result

    def _modulations(self, emb: Tensor | None) -> tuple[Any, ...]:
        """Scale and gate of attention and of feed-forward, each [B, 1, C]; 1 without modulation."""
        if not self.modulation:
            return 1, 1, 1, 1
        scale, gate, ff_scale, ff_gate = self.adaLN_modulation(emb)[:, None].chunk(4, 2)
        return 1 + scale, gate.tanh(), 1 + ff_scale, ff_gate.tanh()

    def _attend(self, x: Tensor, mask: Tensor | None, angles: Tensor) -> Tensor:
        attn = self.attention
        query, key, value = (y.view(*y.shape[:2], attn.heads, -1) for y in project(image_layers(attn), x))
        bias = None if mask is None else ((~mask).to(x.dtype) * _MASKED)[:, None, None]
        out = attend(_rotated(attn.norm_q, query, angles), _rotated(attn.norm_k, key, angles), value, bias)
        projected: Tensor = attn.to_out[0](out.flatten(2))
        return projected


def _rotated(norm: nn.Module | None, x: Tensor, angles: Tensor) -> Tensor:
    """Normalise each head of x [B, S, H, D], then rotate pairs of neighbouring components in float32."""
    pairs = (x if norm is None else norm(x)).float()
    even, odd = pairs.view(*pairs.shape[:-1], -1, 2).unbind(-1)
    cos, sin = angles[:, :, None].unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)
