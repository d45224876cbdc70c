"""SD3's attention on a GPU: what shares an input has it quantised once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.precision.fp8 import project


class FusedAttention:
    """A diffusers attention processor; computes what `JointAttnProcessor2_0` does."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend over image tokens [B, S, C] and, in joint attention, text tokens [B, T, C]."""
        image = hidden_states.shape[1]
        query, key, value = _heads(attn, ("to_q", "to_k", "to_v"), (attn.norm_q, attn.norm_k), hidden_states)
        if encoder_hidden_states is not None:
            names, norms = ("add_q_proj", "add_k_proj", "add_v_proj"), (attn.norm_added_q, attn.norm_added_k)
            text = _heads(attn, names, norms, encoder_hidden_states)
            pairs = zip((query, key, value), text, strict=True)
            query, key, value = (torch.cat(pair, 2) for pair in pairs)
        out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        if encoder_hidden_states is None:
            return _out(attn, out)
        own, context = out[:, :image], out[:, image:]
        return _out(attn, own), context if attn.context_pre_only else attn.to_add_out(context)


def _out(attn: Any, x: Tensor) -> Tensor:
    out: Tensor = attn.to_out[0](x)
    return out


def _heads(attn: Any, names: tuple[str, ...], norms: tuple[nn.Module | None, ...], x: Tensor) -> tuple[Tensor, ...]:
    """Normed queries, normed keys and values [B, H, S, D] of tokens [B, S, C]."""
    projected = project([attn.get_submodule(name) for name in names], x)
    query, key, value = (y.view(len(x), x.shape[1], attn.heads, -1).transpose(1, 2) for y in projected)
    norm_query, norm_key = norms
    return norm_query(query) if norm_query else query, norm_key(key) if norm_key else key, value
