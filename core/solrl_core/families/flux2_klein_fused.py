"""FLUX.2's transformer blocks for a GPU: diffusers' arithmetic in fewer passes over memory.

As FLUX.1's fused blocks, but the modulation is computed once for all blocks, outside of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from solrl_core.families.flux_fused import Angles, joint_attention, rotated
from solrl_core.kernels import attend
from solrl_core.precision.fp8 import Fp8Linear
from solrl_core.precision.fuse import FusedBlock, add_and_feed_forward, image_layers, modulate, text_layers


class Flux2FusedBlock(FusedBlock):
    """Fused `Flux2TransformerBlock` of diffusers."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb_mod_img: Tensor,
        temb_mod_txt: Tensor,
        image_rotary_emb: Angles,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text tokens [B, T, C] and image tokens [B, S, C]; the modulations are [B, 6 · C]."""
        x, text = hidden_states, encoder_hidden_states
        shift, scale, gate, *rest = temb_mod_img.chunk(6, 1)
        text_shift, text_scale, text_gate, *text_rest = temb_mod_txt.chunk(6, 1)
        image_in = modulate(x, self.norm1, scale, shift, image_layers(self.attn))
        text_in = modulate(text, self.norm1_context, text_scale, text_shift, text_layers(self.attn))
        out, text_out = joint_attention(self.attn, image_in, text_in, image_rotary_emb)
        x = add_and_feed_forward(x, out, gate, self.norm2, rest, self.ff)
        return add_and_feed_forward(text, text_out, text_gate, self.norm2_context, text_rest, self.ff_context), x


class Flux2FusedSingleBlock(FusedBlock):
    """Fused `Flux2SingleTransformerBlock` of diffusers."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: None,
        temb_mod: Tensor,
        image_rotary_emb: Angles,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        """Return text and image tokens [B, T + S, C]; the modulation is [B, 3 · C]."""
        x, attn = hidden_states, self.attn
        shift, scale, gate = temb_mod.chunk(3, 1)
        first: nn.Module = attn.to_qkv_mlp_proj
        wide = first(modulate(x, self.norm, scale, shift, [first]))
        q, k, v, mlp = wide.split([attn.inner_dim] * 3 + [wide.shape[-1] - 3 * attn.inner_dim], -1)
        query, key = rotated(attn, "q", image_rotary_emb, q), rotated(attn, "k", image_rotary_emb, k)
        attended = attend(query, key, v.unflatten(-1, query.shape[2:])).flatten(2)
        parts = [attended, attn.mlp_act_fn(mlp)]
        if isinstance(attn.to_out, Fp8Linear):
            out = attn.to_out.of_parts([(part, "") for part in parts])
        else:
            out = attn.to_out(torch.cat(parts, 2))
        return x + gate[:, None] * out
