"""FLUX.1's blocks on a GPU: diffusers' arithmetic in fewer passes over memory.

Queries and keys get their norm and positions in one kernel, layers that share an input have it quantised once, and
what a single-stream block would concatenate for its last layer stays apart.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.kernels import rms_norm_rope
from solrl_core.precision.fp8 import Fp8Linear, project

Angles = tuple[Tensor, Tensor]
"""cos and sin of all positions, each float32 [T + S, D]: T text tokens, then S image tokens."""


class FusedAttention:
    """A diffusers attention processor for double-stream blocks; computes what `FluxAttnProcessor` does."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None,
        image_rotary_emb: Angles,
    ) -> tuple[Tensor, Tensor]:
        """Attend over image tokens [B, S, C] and text tokens [B, T, C] with a diffusers `FluxAttention`."""
        text = encoder_hidden_states.shape[1]
        image_layers = [attn.get_submodule(name) for name in ("to_q", "to_k", "to_v")]
        text_layers = [attn.get_submodule(name) for name in ("add_q_proj", "add_k_proj", "add_v_proj")]
        q, k, v = project(image_layers, hidden_states)
        text_q, text_k, text_v = project(text_layers, encoder_hidden_states)
        query = [_turned(attn, "norm_added_q", text_q, image_rotary_emb, 0)]
        query += [_turned(attn, "norm_q", q, image_rotary_emb, text)]
        key = [_turned(attn, "norm_added_k", text_k, image_rotary_emb, 0)]
        key += [_turned(attn, "norm_k", k, image_rotary_emb, text)]
        out = _attend(torch.cat(query, 1), torch.cat(key, 1), torch.cat([text_v, v], 1))
        return attn.get_submodule("to_out.0")(out[:, text:]), attn.get_submodule("to_add_out")(out[:, :text])


class FusedSingleBlock(nn.Module):
    """diffusers' `FluxSingleTransformerBlock`, with the same parts."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm = block.get_submodule("norm")
        self.attn = block.get_submodule("attn")
        self.proj_mlp = block.get_submodule("proj_mlp")
        self.proj_out = block.get_submodule("proj_out")

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Angles,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Text [B, T, C] and image tokens [B, S, C] as the block leaves them."""
        text = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, hidden_states], 1)
        normed, gate = self.norm(x, emb=temb)
        layers = [*(self.attn.get_submodule(name) for name in ("to_q", "to_k", "to_v")), self.proj_mlp]
        q, k, v, wide = project(layers, normed)
        query = _turned(self.attn, "norm_q", q, image_rotary_emb, 0)
        attended = _attend(query, _turned(self.attn, "norm_k", k, image_rotary_emb, 0), v)
        if isinstance(self.proj_out, Fp8Linear):
            out = self.proj_out.of_parts([(attended, ""), (wide, "gelu_tanh")])
        else:
            out = self.proj_out(torch.cat([attended, F.gelu(wide, approximate="tanh")], 2))
        x = x + gate.unsqueeze(1) * out
        return x[:, :text], x[:, text:]


def _turned(attn: nn.Module, norm: str, x: Tensor, angles: Angles, first: int) -> Tensor:
    """Queries or keys [B, S, H·D], whose first token is at position `first`, before attention: [B, S, H, D]."""
    cos, sin = angles
    rms = attn.get_submodule(norm)
    heads = x.view(*x.shape[:-1], -1, cos.shape[-1])
    out: Tensor = rms_norm_rope(heads, rms.get_parameter("weight"), cos, sin, first, rms.eps)  # type: ignore[arg-type]
    return out


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Query and key [B, S, H, D], value [B, S, H·D] → [B, S, H·D]."""
    value = value.view(key.shape)
    out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return out.transpose(1, 2).flatten(2)
