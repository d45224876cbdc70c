"""Fusion of the operations between FP8 layers into the pass that quantises the next layer's input.

Covers the activation function of a feed-forward, and the norm, modulation and residual of a transformer block.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from solrl_core.kernels.modulate import add_norm_modulate_quantize, norm_modulate_quantize
from solrl_core.precision.fp8 import Fp8Linear, Quantized, by_row


class FusedBlock(nn.Module):
    """A module that has the submodules and parameters of one of diffusers, by their names."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._modules.update(block._modules)
        self._parameters.update(block._parameters)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Mapped(nn.Module):
    """A module whose output is changed by a function."""

    def __init__(self, module: nn.Module, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self.change = change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(self.module(*args, **kwargs))


class Projection(FusedBlock):
    """The projection of a diffusers `GELU`, without the activation."""

    def forward(self, x: Tensor | Quantized) -> Tensor:
        """[..., in] → [..., out]."""
        out: Tensor = self.proj(x)
        return out


def fuse_feed_forwards(transformer: nn.Module) -> None:
    """Move the tanh-GELU of every diffusers `FeedForward` into its second layer, if that layer is FP8."""
    from diffusers.models.activations import GELU
    from diffusers.models.attention import FeedForward

    for module in transformer.modules():
        if isinstance(module, FeedForward):
            first, last = module.net[0], module.net[2]
            if isinstance(first, GELU) and first.approximate == "tanh" and isinstance(last, Fp8Linear):
                module.net[0] = Projection(first)
                last.activation = "gelu_tanh"


def image_layers(attn: Any) -> list[nn.Module]:
    """Query, key and value projections of a diffusers attention, for image tokens."""
    return [attn.to_q, attn.to_k, attn.to_v]


def text_layers(attn: Any) -> list[nn.Module]:
    """Query, key and value projections of a diffusers joint attention, for text tokens."""
    return [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]


def modulations(norm: Any, emb: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` modulation vectors [B, C] (shifts, scales, gates) of a diffusers adaptive norm for `emb` [B, C]."""
    slices: tuple[Tensor, ...] = norm.linear(norm.silu(emb)).chunk(count, 1)
    return slices


def modulate(x: Tensor, norm: Any, scale: Tensor, shift: Tensor, layers: Sequence[nn.Module]) -> Tensor | Quantized:
    """norm(x) · (1 + scale) + shift, [B, S, C]; quantised if all `layers` accept a `Quantized` input.

    `x` is [B, S, C]; scale and shift are [B, C]; `norm` is a layer norm without weights. All `layers` take the result.
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
    """Second half of a transformer block: x + gate · out, then norm, modulation and feed-forward; [B, S, C].

    Args:
        x, out: [B, S, C], input of the block and output of its attention.
        gate: [B, C].
        norm: a layer norm without weights.
        modulation: shift, scale and gate of the feed-forward, each [B, C].
        feed_forward: diffusers' `FeedForward`, or FLUX.2's.
    """
    shift, scale, last_gate = modulation
    layers: list[nn.Module] = [getattr(feed_forward, "linear_in", None) or feed_forward.net[0].proj]
    modulated: Tensor | Quantized
    if by_row(layers):
        layers[0].require_no_gradient(x)
        x, codes, scales = add_norm_modulate_quantize(x, out, gate, scale, shift, norm.eps)
        modulated = Quantized(codes, scales, x.dtype)
    else:
        x = x + gate[:, None] * out
        modulated = modulate(x, norm, scale, shift, layers)
    residual: Tensor = feed_forward(modulated)
    return x + last_gate[:, None] * residual
