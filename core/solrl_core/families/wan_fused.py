"""Wan's transformer blocks for a GPU: diffusers' arithmetic in fewer passes over memory.

Layers that share an input share its quantisation, which is computed with the norm before it. Where these layers are in
FP8, so is the attention among the clip's tokens, which takes most of a pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from solrl_core.kernels import attend, fp8_attention, has_fp8_attention
from solrl_core.precision.fp8 import Quantized, by_row, project
from solrl_core.precision.fuse import FusedBlock, image_layers, modulate


class WanFusedBlock(FusedBlock):
    """Fused `WanTransformerBlock` of diffusers."""

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the clip's tokens [B, S, C]; the modulation is [B, 6, C], cosines and sines are [1, S, 1, D]."""
        x = hidden_states
        shift, scale, gate, *rest = (self.scale_shift_table + temb.float()).unbind(1)
        attn = self.attn1
        q, k, v = project(image_layers(attn), _modulated(x, self.norm1, scale, shift, image_layers(attn)))
        q, k = (_rotated(_heads(norm(y), attn), rotary_emb) for norm, y in ((attn.norm_q, q), (attn.norm_k, k)))
        fast = by_row(image_layers(attn)) and has_fp8_attention(x.device, q.shape[-1])
        x = _added(x, _attended(attn, q, k, v, fp8_attention if fast else attend), gate)
        attn = self.attn2
        k, v = project([attn.to_k, attn.to_v], encoder_hidden_states)
        q = attn.norm_q(attn.to_q(self.norm2(x.float()).to(x.dtype)))
        x = x + _attended(attn, _heads(q, attn), _heads(attn.norm_k(k), attn), v, attend)
        shift, scale, gate = rest
        return _added(x, self.ffn(_modulated(x, self.norm3, scale, shift, [self.ffn.net[0].proj])), gate)


def _modulated(x: Tensor, norm: Any, scale: Tensor, shift: Tensor, layers: list[nn.Module]) -> Tensor | Quantized:
    """`modulate`, which is in float32 here even if nothing is quantised."""
    if by_row(layers):
        return modulate(x, norm, scale, shift, layers)
    modulated: Tensor = norm(x.float()) * (1 + scale[:, None]) + shift[:, None]
    return modulated.to(x.dtype)


def _added(x: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    return (x.float() + out.float() * gate[:, None]).to(x.dtype)


def _heads(x: Tensor, attn: Any) -> Tensor:
    return x.view(*x.shape[:2], attn.heads, -1)


def _attended(attn: Any, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    """Output [B, S, C] of an attention whose query and key have heads [B, S, H, D]."""
    out: Tensor = attn.to_out[0](attention(query, key, _heads(value, attn)).flatten(2))
    return out


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of neighbouring components of x [B, S, H, D]; each pair's cosine and sine come twice."""
    cos, sin = (values[..., 0::2] for values in angles)
    even, odd = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)
