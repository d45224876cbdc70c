"""What lies between FP8 layers, left to the pass that quantises their input.

That is the activation function of a feed-forward, and norm, modulation and residual of a transformer block.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from solrl_core.kernels import add_norm_modulate_quantize, norm_modulate_quantize
from solrl_core.precision.fp8 import Fp8Linear, Quantized, by_row


class Projection(nn.Module):
    """The projection of a diffusers `GELU`, without the activation."""

    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, x: Tensor | Quantized) -> Tensor:
        """[..., in] → [..., out]."""
        out: Tensor = self.proj(x)
        return out


def fuse_feed_forwards(transformer: nn.Module) -> None:
    """In every diffusers `FeedForward` with a tanh-GELU and an FP8 layer after it, leave the GELU to that layer."""
    from diffusers.models.activations import GELU
    from diffusers.models.attention import FeedForward

    for module in transformer.modules():
        if isinstance(module, FeedForward):
            first, last = module.net[0], module.net[2]
            if isinstance(first, GELU) and first.approximate == "tanh" and isinstance(last, Fp8Linear):
                module.net[0] = Projection(first.proj)
                last.activation = "gelu_tanh"


def image_layers(attn: Any) -> list[nn.Module]:
    """What a diffusers attention gives image tokens to."""
    return [attn.to_q, attn.to_k, attn.to_v]


def text_layers(attn: Any) -> list[nn.Module]:
    """What a diffusers joint attention gives text tokens to."""
    return [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]


def modulations(norm: Any, emb: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` slices [B, C] that a diffusers adaptive norm makes of `emb` [B, C]."""
    slices: tuple[Tensor, ...] = norm.linear(norm.silu(emb)).chunk(count, 1)
    return slices


def modulate(x: Tensor, norm: Any, scale: Tensor, shift: Tensor, layers: Sequence[nn.Module]) -> Tensor | Quantized:
    """norm(x) · (1 + scale) + shift [B, S, C], quantised where all `layers`, to which it goes, take it so.

    Args:
        x: [B, S, C].
        norm: a layer norm without weights.
        scale, shift: [B, C].
        layers: all that is given the result.
    """
    if by_row(layers):
        layers[0].require_no_gradient(x)
        codes, scales = norm_modulate_quantize(x, scale, shift, norm.eps)
        return Quantized(codes, scales, x.dtype)
    modulated: Tensor = norm(x) * (1 + scale[:, None]) + shift[:, None]
    return modulated


def add_and_feed_forward(
    x: Tensor, out: Tensor, gate: Tensor, norm: Any, modulation: Sequence[Tensor], feed_forward: Any
) -> Tensor:
    """The second half of a transformer block: [B, S, C] as it leaves the block.

    Args:
        x: [B, S, C], to which gate · out is added first.
        out: of the block's attention, [B, S, C].
        gate: [B, C].
        norm: a layer norm without weights.
        modulation: shift, scale and gate of the feed-forward, each [B, C].
        feed_forward: diffusers' `FeedForward`.
    """
    shift, scale, last_gate = modulation
    layers: list[nn.Module] = [feed_forward.net[0].proj]
    given: Tensor | Quantized
    if by_row(layers):
        layers[0].require_no_gradient(x)
        x, codes, scales = add_norm_modulate_quantize(x, out, gate, scale, shift, norm.eps)
        given = Quantized(codes, scales, x.dtype)
    else:
        x = x + gate[:, None] * out
        given = modulate(x, norm, scale, shift, layers)
    fed: Tensor = feed_forward(given)
    return x + last_gate[:, None] * fed
