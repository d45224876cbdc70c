"""FLUX.1's attention on a GPU: one kernel between the projections of queries or keys and the attention itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.kernels import rms_norm_rope


class FusedAttention:
    """A diffusers attention processor; computes what `FluxAttnProcessor` does."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend over text, where it comes apart, and image tokens.

        Args:
            attn: a diffusers `FluxAttention`.
            hidden_states: [B, S, C].
            encoder_hidden_states: of the text, which comes first, [B, T, C]; None in single-stream blocks.
            attention_mask: None; the family has none.
            image_rotary_emb: cos and sin of all positions, [T + S, D].
        """
        assert attention_mask is None
        assert image_rotary_emb is not None
        cos, sin = image_rotary_emb

        def heads(name: str, x: Tensor) -> Tensor:
            out: Tensor = attn.get_submodule(name)(x)
            return out.view(*x.shape[:-1], -1, cos.shape[-1])

        def turned(name: str, norm: str, x: Tensor, first: int) -> Tensor:
            rms = attn.get_submodule(norm)
            out: Tensor = rms_norm_rope(heads(name, x), rms.get_parameter("weight"), cos, sin, first, rms.eps)
            return out

        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        query = turned("to_q", "norm_q", hidden_states, text)
        key = turned("to_k", "norm_k", hidden_states, text)
        value = heads("to_v", hidden_states)
        if encoder_hidden_states is not None:
            query = torch.cat([turned("add_q_proj", "norm_added_q", encoder_hidden_states, 0), query], 1)
            key = torch.cat([turned("add_k_proj", "norm_added_k", encoder_hidden_states, 0), key], 1)
            value = torch.cat([heads("add_v_proj", encoder_hidden_states), value], 1)

        out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        out = out.transpose(1, 2).flatten(2)
        if encoder_hidden_states is None:
            return out
        return attn.get_submodule("to_out.0")(out[:, text:]), attn.get_submodule("to_add_out")(out[:, :text])
