"""Qwen-Image's transformer blocks for a GPU: diffusers' arithmetic in fewer passes over memory, and in real numbers.

They share FLUX.1's fused attention. Diffusers rotates queries and keys by complex numbers; torch's compiler
generates no code for them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.flux_fused import Angles, joint_attention
from solrl_core.precision.fuse import FusedBlock, add_and_feed_forward, image_layers, modulate, text_layers

_MASKED = -10000.0
"""Added to the logits of padding; its weight in a softmax is then exactly 0."""


class RealPositions(nn.Module):
    """Cosines and sines of the angles that a position embedding returns as complex numbers."""

    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, *args: Any, **kwargs: Any) -> Angles:
        """Cosine and sine, each float32 [T + S, D/2]: text tokens, then image tokens."""
        image, text = self.positions(*args, **kwargs)
        turns = torch.cat([text, image])
        return turns.real.contiguous(), turns.imag.contiguous()


class QwenFusedBlock(FusedBlock):
    """Fused `QwenImageTransformerBlock` of diffusers; takes real angles."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Angles,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text tokens [B, T, C] and image tokens [B, S, C]; the mask [B, T] is False at padding."""
        x, text = hidden_states, encoder_hidden_states
        shift, scale, gate, *rest = self.img_mod(temb).chunk(6, 1)
        text_shift, text_scale, text_gate, *text_rest = self.txt_mod(temb).chunk(6, 1)
        image_in = modulate(x, self.img_norm1, scale, shift, image_layers(self.attn))
        text_in = modulate(text, self.txt_norm1, text_scale, text_shift, text_layers(self.attn))
        if encoder_hidden_states_mask is None:  # diffusers 0.38 gives [B, 1, 1, T + S] here instead
            assert joint_attention_kwargs is not None
            encoder_hidden_states_mask = joint_attention_kwargs["attention_mask"][:, 0, 0, : text.shape[1]]
        mask = F.pad((~encoder_hidden_states_mask).to(x.dtype) * _MASKED, (0, x.shape[1]))[:, None, None]
        out, text_out = joint_attention(self.attn, image_in, text_in, image_rotary_emb, mask)
        x = add_and_feed_forward(x, out, gate, self.img_norm2, rest, self.img_mlp)
        return add_and_feed_forward(text, text_out, text_gate, self.txt_norm2, text_rest, self.txt_mlp), x
