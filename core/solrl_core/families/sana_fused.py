"""SANA's attention and feed-forward for a GPU: diffusers' arithmetic in fewer passes over memory."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.kernels.attention import attend
from solrl_core.kernels.depthwise import silu_depthwise_glu
from solrl_core.kernels.linear_attention import linear_attention, plain_linear_attention
from solrl_core.precision.fp8 import project
from solrl_core.precision.fuse import FusedBlock


class FusedLinearAttention:
    """A diffusers attention processor, equivalent to `SanaLinearAttnProcessor2_0`."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: None = None, attention_mask: None = None
    ) -> Tensor:
        """Linear attention over image tokens [B, S, C]."""
        query, key, value = project([attn.to_q, attn.to_k, attn.to_v], hidden_states)
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        attend_linearly = plain_linear_attention if torch.is_grad_enabled() else linear_attention
        out: Tensor = attn.to_out[0](attend_linearly(query, key, value, attn.heads))
        return out


def compute_equal_rows_once(layer: nn.Module) -> None:
    """Make a layer over [B, ...] compute a single row if its input is one row expanded to a batch; changed in place."""
    forward = layer.forward

    def once(x: Tensor) -> Tensor:
        out: Tensor = forward(x[:1]).expand(len(x), *x.shape[1:-1], -1) if rows_are_equal(x) else forward(x)
        return out

    layer.forward = once


def rows_are_equal(x: Tensor) -> bool:
    """Whether all rows of `x` [B, ...] are views of one."""
    return x.stride(0) == 0


class FusedCrossAttention:
    """A diffusers attention processor, equivalent to `SanaAttnProcessor2_0`.

    Keys and values of a batch of one prompt are computed once; all its image tokens then query them as one sequence.
    """

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Attention of image tokens [B, S, C] over text tokens [B, T, C]; the mask [B, 1, T] is added to the logits."""
        query = attn.to_q(hidden_states)
        if rows_are_equal(encoder_hidden_states):
            query, encoder_hidden_states = query.flatten(0, 1)[None], encoder_hidden_states[:1]
            attention_mask = None if attention_mask is None else attention_mask[:1]
        key, value = project([attn.to_k, attn.to_v], encoder_hidden_states)
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        mask = None if attention_mask is None else attention_mask[:, None]
        query, key, value = (x.unflatten(-1, (attn.heads, -1)) for x in (query, key, value))
        attended = attend(query, key, value, mask).flatten(2).view(*hidden_states.shape[:2], -1)
        out: Tensor = attn.to_out[0](attended) / attn.rescale_output_factor
        return out


class FusedFeedForward(FusedBlock):
    """Fused `GLUMBConv` of diffusers, as SANA's blocks use it (no norm, no residual).

    Channels stay last. Without gradient mode, one kernel computes everything between the two pointwise convolutions.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C, H, W], both channels-last in memory."""
        depth = self.conv_depth
        wide = _pointwise(self.conv_inverted, x.movedim(1, -1))
        if torch.is_grad_enabled():
            hidden, gate = depth(F.silu(wide).movedim(-1, 1)).chunk(2, 1)
            return _pointwise(self.conv_point, (hidden * F.silu(gate)).movedim(1, -1)).movedim(-1, 1)
        gated = silu_depthwise_glu(wide, depth.weight, depth.bias)
        return _pointwise(self.conv_point, gated).movedim(-1, 1)


def _pointwise(conv: nn.Module, x: Tensor) -> Tensor:
    """A 1×1 convolution over the last axis of [B, H, W, C]."""
    if isinstance(conv, nn.Conv2d):
        return F.linear(x, conv.weight.flatten(1), conv.bias)
    out: Tensor = conv(x.movedim(-1, 1))
    return out.movedim(1, -1)
