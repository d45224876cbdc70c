"""FLUX.1's transformer blocks for a GPU: diffusers' arithmetic in fewer passes over memory.

One kernel applies the norm and the position embedding of queries and keys. Layers that share an input share its
quantisation, which is fused with the norm and modulation before them. A single-stream block does not concatenate the
inputs of its last layer. From the first of these blocks to the last, text and image tokens stay one sequence.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.kernels.attention import attend
from solrl_core.kernels.rope import rms_norm_rope
from solrl_core.precision.fp8 import Fp8Linear, Quantized, project
from solrl_core.precision.fuse import FusedBlock, add_and_feed_forward, image_layers, modulate, modulations, text_layers

Angles = tuple[Tensor, Tensor]
"""Cosine and sine of each pair's angle, each float32 [T + S, D/2]: T text tokens, then S image tokens."""


def once_a_pair(angles: tuple[Tensor, Tensor]) -> Angles:
    """Each angle once; the position embedding of diffusers has it for both components of a pair, [N, D]."""
    cos, sin = angles
    return cos[:, ::2].contiguous(), sin[:, ::2].contiguous()


class FluxFusedBlock(FusedBlock):
    """Fused `FluxTransformerBlock` of diffusers."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Angles,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text tokens [B, T, C] and image tokens [B, S, C]."""
        x, text = hidden_states, encoder_hidden_states
        shift, scale, gate, *feed_forward_modulation = modulations(self.norm1, temb, 6)
        text_shift, text_scale, text_gate, *text_rest = modulations(self.norm1_context, temb, 6)
        image_in = modulate(x, self.norm1.norm, scale, shift, image_layers(self.attn))
        text_in = modulate(text, self.norm1_context.norm, text_scale, text_shift, text_layers(self.attn))
        out, text_out = joint_attention(self.attn, image_in, text_in, image_rotary_emb)
        x = add_and_feed_forward(x, out, gate, self.norm2, feed_forward_modulation, self.ff)
        return add_and_feed_forward(text, text_out, text_gate, self.norm2_context, text_rest, self.ff_context), x


class FluxFusedSingleBlock(FusedBlock):
    """Fused `FluxSingleTransformerBlock` of diffusers.

    Until the `last` block, image tokens [B, T + S, C] begin with the text tokens, and [B, T, 0] stands for the text.
    """

    def __init__(self, block: nn.Module, last: bool) -> None:
        super().__init__(block)
        self.last = last

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Angles,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text tokens [B, T, C] and image tokens [B, S, C], or both as one sequence."""
        _, text, width = encoder_hidden_states.shape
        x = torch.cat([encoder_hidden_states, hidden_states], 1) if width else hidden_states
        shift, scale, gate = modulations(self.norm, temb, 3)
        layers = [*image_layers(self.attn), self.proj_mlp]
        q, k, v, wide = project(layers, modulate(x, self.norm.norm, scale, shift, layers))
        query = rotated(self.attn, "q", image_rotary_emb, q)
        attended = _attend(query, rotated(self.attn, "k", image_rotary_emb, k), v)
        if isinstance(self.proj_out, Fp8Linear):
            out = self.proj_out.of_parts([(attended, ""), (wide, "gelu_tanh")])
        else:
            out = self.proj_out(torch.cat([attended, F.gelu(wide, approximate="tanh")], 2))
        x = x + gate[:, None] * out
        if not self.last:
            return x.new_empty(len(x), text, 0), x
        # Copies, which cost nothing compiled: a view's gradient would be padded outside of the compiled graph.
        return x[:, :text].clone(), x[:, text:].clone()


def joint_attention(
    attn: Any, x: Tensor | Quantized, text: Tensor | Quantized, angles: Angles, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Joint attention (diffusers' `FluxAttention` and similar modules) over image and text tokens, in their shapes.

    Image tokens `x` are [B, S, C], text tokens [B, T, C]. The mask [B, 1, 1, T + S] is added to the logits.
    """
    q, k, v = project(image_layers(attn), x)
    text_q, text_k, text_v = project(text_layers(attn), text)
    first = text_q.shape[1]
    query, key = rotated(attn, "q", angles, q, text_q), rotated(attn, "k", angles, k, text_k)
    out = _attend(query, key, torch.cat([text_v, v], 1), mask)
    return attn.to_out[0](out[:, first:]), attn.to_add_out(out[:, :first])


def rotated(attn: Any, name: str, angles: Angles, x: Tensor, text: Tensor | None = None) -> Tensor:
    """Queries ("q") or keys ("k") [B, T + S, H, D], normalised by diffusers' module and rotated.

    `x` is [B, S, H·D]. Text tokens [B, T, H·D] come first and have a norm of their own.
    """
    cos, sin = angles
    size = 2 * cos.shape[-1]
    norm = getattr(attn, f"norm_{name}")
    arguments = (x.view(*x.shape[:-1], -1, size), norm.weight, cos, sin, norm.eps)
    if text is None:
        return rms_norm_rope(*arguments)
    return rms_norm_rope(*arguments, text.view(*text.shape[:-1], -1, size), getattr(attn, f"norm_added_{name}").weight)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of query and key [B, S, H, D] over value [B, S, H·D]; returns [B, S, H·D]."""
    return attend(query, key, value.view(key.shape), mask).flatten(2)
