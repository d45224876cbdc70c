"""Decoders of autoencoders for a GPU: diffusers' arithmetic, up to rounding, in faster kernels.

3×3 convolutions run as matrix products, without enlarging an image first. An activation after one, or SANA's norm and
residual, is computed with it, before its result leaves for memory. A group norm and the SiLU after it are one
operation. A convolution with a scale computes in FP8; what comes before it then rounds its result to E4M3, where it is
one operation with it.
"""

import copy
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.dc_ae_fused import fused_block
from solrl_core.kernels import convolve, convolve_norm, group_norm_silu, wide_attention
from solrl_core.kernels.convolve import (
    CHANNELS_IN,
    CHANNELS_IN_FP8,
    CHANNELS_OUT,
    NORM_CHANNELS,
    WIDTH,
    packed_codes,
    packed_weight,
    plain_convolve,
    plain_convolve_norm,
)
from solrl_core.kernels.operation import has_descriptors
from solrl_core.kernels.rows import scaled_codes

Scales = Mapping[nn.Module, float]
"""Convolution → scale of its input in FP8; other convolutions compute in the autoencoder's dtype."""


class Convolution(nn.Module):
    """A 3×3 convolution [B, C, H, W] → [B, O, H, W], built from torch's module, whose weights it shares.

    With `enlarge`, the image is made twice as high and wide by nearest neighbours before, and the weights are packed
    again. Narrow images keep torch's arithmetic.
    """

    scale: Tensor | None
    packed: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, *, enlarge: bool = False) -> None:
        super().__init__()
        self.enlarge = enlarge
        self.conv = conv
        self.register_buffer("scale", None)
        self._hold(packed_weight(conv.weight.detach(), enlarge=enlarge), conv)

    def _hold(self, packed: Tensor, conv: nn.Conv2d) -> None:
        weight = conv.weight.detach()
        bias = weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias.detach()
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor, *, silu: bool = False, out_scale: Tensor | None = None) -> Tensor:
        """Convolve; with `silu`, activate; with `out_scale`, return E4M3 codes."""
        if x.shape[-1] >= WIDTH:
            return convolve(x, self.packed, self.bias, None, self.enlarge, silu, out_scale)
        convolved: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest") if self.enlarge else x)
        convolved = F.silu(convolved) if silu else convolved
        return convolved if out_scale is None else scaled_codes(convolved, out_scale)

    def with_norm(self, x: Tensor, norm: Any, residual: Tensor, out_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve without enlarging, normalise by diffusers' `RMSNorm` and add, as `convolve_norm` does."""
        run = convolve_norm if x.shape[-1] >= WIDTH else plain_convolve_norm
        return run(x, self.packed, self.bias, None, norm.weight, norm.bias, norm.eps, residual, out_scale)


class Fp8Convolution(Convolution):
    """A 3×3 convolution in FP8, of images [B, C, H, W] in the weights' dtype or as E4M3 codes with its `scale`.

    Without a kernel for it, codes are multiplied in float32.
    """

    scale: Tensor
    factors: Tensor

    def __init__(self, conv: nn.Conv2d, scale: float, *, enlarge: bool = False) -> None:
        nn.Module.__init__(self)
        self.enlarge = enlarge
        # A tensor, because the compiler would compile each number anew.
        self.register_buffer("scale", torch.tensor(scale, device=conv.weight.device), persistent=False)
        packed, scales = packed_codes(conv.weight.detach(), enlarge=enlarge)
        self._hold(packed, conv)
        self.register_buffer("factors", scales / scale, persistent=False)
        fits = convolution_fits(conv) and conv.in_channels % CHANNELS_IN_FP8 == 0
        self._has_kernel = fits and has_descriptors(conv.weight.device) and self.bias.dtype == torch.bfloat16

    def _codes(self, x: Tensor) -> Tensor:
        return x if x.dtype == torch.float8_e4m3fn else scaled_codes(x, self.scale)

    def forward(self, x: Tensor, *, silu: bool = False, out_scale: Tensor | None = None) -> Tensor:
        """Convolve; with `silu`, activate; with `out_scale`, return E4M3 codes."""
        run = convolve if self._has_kernel else plain_convolve
        return run(self._codes(x), self.packed, self.bias, self.factors, self.enlarge, silu, out_scale)

    def with_norm(self, x: Tensor, norm: Any, residual: Tensor, out_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve without enlarging, normalise by diffusers' `RMSNorm` and add, as `convolve_norm` does."""
        run, codes = convolve_norm if self._has_kernel else plain_convolve_norm, self._codes(x)
        return run(codes, self.packed, self.bias, self.factors, norm.weight, norm.bias, norm.eps, residual, out_scale)


def convolution(conv: nn.Conv2d, scales: Scales, *, enlarge: bool = False) -> Convolution:
    """The convolution in FP8 if it has a scale, else in its weights' dtype."""
    scale = scales.get(conv)
    return Convolution(conv, enlarge=enlarge) if scale is None else Fp8Convolution(conv, scale, enlarge=enlarge)


class NormSilu(nn.Module):
    """A group norm and the SiLU after it, [B, C, H, W]."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, out_scale: Tensor | None = None) -> Tensor:
        """Normalise and activate; with `out_scale`, return E4M3 codes."""
        norm = self.norm
        return group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, norm.eps, out_scale)


class ResnetBlock(nn.Module):
    """`ResnetBlock2D` of diffusers without a time embedding."""

    def __init__(self, block: Any, scales: Scales) -> None:
        super().__init__()
        self.norm1, self.conv1 = NormSilu(block.norm1), convolution(block.conv1, scales)
        self.norm2, self.conv2 = NormSilu(block.norm2), convolution(block.conv2, scales)
        self.conv_shortcut = block.conv_shortcut

    def forward(self, hidden_states: Tensor, temb: None = None) -> Tensor:
        """Convolve twice, each time after a norm, and add the input: [B, C, H, W] → [B, O, H, W]."""
        hidden = self.conv1(self.norm1(hidden_states, self.conv1.scale))
        shortcut = hidden_states if self.conv_shortcut is None else self.conv_shortcut(hidden_states)
        out: Tensor = self.conv2(self.norm2(hidden, self.conv2.scale)) + shortcut
        return out


class Stream(NamedTuple):
    """Images [B, C, H, W], and their E4M3 codes for the next block's first convolution."""

    images: Tensor
    codes: Tensor


class DCBlock(nn.Module):
    """A block of diffusers' `AutoencoderDC`.

    Attributes:
        following: scale of the FP8 codes that the next block takes from this block; None if it takes none.
    """

    following: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("following", None)

    def _passed_on(self, images: Tensor) -> Tensor | Stream:
        # The compiler writes both in one pass over memory.
        return images if self.following is None else Stream(images, scaled_codes(images, self.following))


class DCResBlock(DCBlock):
    """`ResBlock` of diffusers' `AutoencoderDC`, [B, C, H, W]."""

    def __init__(self, block: Any, scales: Scales) -> None:
        super().__init__()
        self.conv1, self.conv2 = convolution(block.conv1, scales), convolution(block.conv2, scales)
        self.norm = block.norm
        affine = block.norm.weight is not None and block.norm.bias is not None
        self._at_once = affine and block.conv2.out_channels in NORM_CHANNELS

    def forward(self, hidden_states: Tensor | Stream) -> Tensor | Stream:
        """Convolve twice, normalise each pixel, and add the input."""
        images, inputs = hidden_states if isinstance(hidden_states, Stream) else (hidden_states, hidden_states)
        activated = self.conv1(inputs, silu=True, out_scale=self.conv2.scale)
        if self._at_once:
            out, codes = self.conv2.with_norm(activated, self.norm, images, self.following)
            return out if self.following is None else Stream(out, codes)
        hidden = self.conv2(activated)
        normed: Tensor = self.norm(hidden.movedim(1, -1)).movedim(-1, 1)
        return self._passed_on(normed + images)


class Upsample(nn.Module):
    """`Upsample2D` of diffusers with a convolution."""

    def __init__(self, upsample: Any, scales: Scales) -> None:
        super().__init__()
        self.conv = convolution(upsample.conv, scales, enlarge=True)

    def forward(self, hidden_states: Tensor, output_size: None = None) -> Tensor:
        """[B, C, H, W] → [B, O, 2·H, 2·W]."""
        out: Tensor = self.conv(hidden_states)
        return out


class NormRelu(nn.Module):
    """The last norm of diffusers' `AutoencoderDC` and the ReLU after it; compiled, they are one pass over memory."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, C] → [B, H, W, C]."""
        return F.relu(self.norm(x))


class UpBlock(DCBlock):
    """`DCUpBlock2d` of diffusers, which adds its input with channels rearranged to pixels."""

    def __init__(self, block: Any, scales: Scales) -> None:
        super().__init__()
        self.conv = convolution(block.conv, scales, enlarge=True)
        self._repeats: int = block.repeats
        self._shortcut: bool = block.shortcut

    def forward(self, hidden_states: Tensor) -> Tensor | Stream:
        """[B, C, H, W] → [B, O, 2·H, 2·W]."""
        out: Tensor = self.conv(hidden_states)
        if self._shortcut:
            out = out + F.pixel_shuffle(hidden_states.repeat_interleave(self._repeats, dim=1), 2)
        return self._passed_on(out)


class PixelAttention(nn.Module):
    """Self-attention over pixels, built from diffusers' `Attention` of an autoencoder."""

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, hidden_states: Tensor, temb: None = None) -> Tensor:
        """Attend and add the input: [B, C, H, W]."""
        attn = self.attn
        normed = attn.group_norm(hidden_states.flatten(2)).mT
        attended = wide_attention(attn.to_q(normed), attn.to_k(normed), attn.to_v(normed))
        out: Tensor = attn.to_out[0](attended).mT.reshape(hidden_states.shape)
        return out + hidden_states


def fused_decoder(vae: nn.Module, scales: Mapping[str, float] | None = None) -> nn.Module:
    """A copy of an autoencoder whose decoder has this module's parts where they fit; it shares all weights.

    The parts are not differentiable.

    Args:
        vae: the autoencoder.
        scales: scales of the inputs of the decoder's convolutions that compute in FP8, by their names in it.
    """
    fused = weight_sharing_copy(vae)
    decoder = fused.get_submodule("decoder")
    by_module = _by_module(decoder, scales or {})
    _replace(decoder, by_module)
    if _norm_fits(getattr(decoder, "conv_norm_out", None), getattr(decoder, "conv_act", None)):
        decoder.conv_norm_out, decoder.conv_act = NormSilu(decoder.conv_norm_out), nn.Identity()  # type: ignore[arg-type]
    if hasattr(decoder, "norm_out") and isinstance(getattr(decoder, "conv_act", None), nn.ReLU):
        decoder.norm_out, decoder.conv_act = NormRelu(decoder.norm_out), nn.Identity()  # type: ignore[arg-type]
    _round_others(decoder, by_module)
    return fused


def rounded_decoder(vae: nn.Module, scales: Mapping[str, float]) -> nn.Module:
    """A copy of an autoencoder whose decoder has only these convolutions replaced, by FP8 ones; see `fused_decoder`."""
    rounded = weight_sharing_copy(vae)
    decoder = rounded.get_submodule("decoder")
    _round_others(decoder, _by_module(decoder, scales))
    return rounded


def weight_sharing_copy(vae: nn.Module) -> nn.Module:
    """A copy of a module with the same tensors."""
    tensors = [*vae.parameters(), *vae.buffers()]
    return copy.deepcopy(vae, {id(tensor): tensor for tensor in tensors})


def _by_module(decoder: nn.Module, scales: Mapping[str, float]) -> Scales:
    return {decoder.get_submodule(name): scale for name, scale in scales.items()}


def _round_others(decoder: nn.Module, scales: Scales) -> None:
    """Replace the convolutions that have a scale and that no fused block has taken."""
    for parent in list(decoder.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Conv2d) and child in scales:
                setattr(parent, name, Fp8Convolution(child, scales[child]))


def _replace(module: nn.Module, scales: Scales) -> None:
    for name, child in module.named_children():
        if (fused := _fused(child, scales)) is not None:
            setattr(module, name, fused)
        else:
            _replace(child, scales)
    if isinstance(module, nn.Sequential):
        for block, after in pairwise(module):
            if isinstance(block, DCBlock) and isinstance(after, DCResBlock):
                block.register_buffer("following", after.conv1.scale, persistent=False)


def _fused(module: Any, scales: Scales) -> nn.Module | None:
    from diffusers.models.attention_processor import Attention
    from diffusers.models.autoencoders.autoencoder_dc import DCUpBlock2d, ResBlock
    from diffusers.models.upsampling import Upsample2D

    if (block := fused_block(module)) is not None:
        return block
    conv = getattr(module, "conv", None)
    if isinstance(module, Upsample2D) and module.interpolate and module.norm is None and convolution_fits(conv):
        return Upsample(module, scales)
    if (
        isinstance(module, DCUpBlock2d)
        and module.interpolate
        and module.interpolation_mode == "nearest"
        and convolution_fits(conv)
    ):
        return UpBlock(module, scales)
    if isinstance(module, Attention) and _is_wide(module):
        return PixelAttention(module)
    if _resnet_fits(module):
        return ResnetBlock(module, scales)
    if isinstance(module, ResBlock) and _res_block_fits(module):
        return DCResBlock(module, scales)
    return convolution(module, scales) if isinstance(module, nn.Conv2d) and convolution_fits(module) else None


def is_plain_convolution(conv: Any) -> bool:
    """Whether this is a 3×3 convolution as the operations compute it, of any number of channels."""
    if not isinstance(conv, nn.Conv2d):
        return False
    form = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    return form == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")


def convolution_fits(conv: Any) -> bool:
    """Whether the kernel computes this convolution."""
    return is_plain_convolution(conv) and (conv.in_channels % CHANNELS_IN, conv.out_channels % CHANNELS_OUT) == (0, 0)


def _resnet_fits(block: Any) -> bool:
    """Whether this is a `ResnetBlock2D` of an autoencoder that the kernels compute whole."""
    from diffusers.models.resnet import ResnetBlock2D

    if not isinstance(block, ResnetBlock2D) or block.upsample is not None or block.downsample is not None:
        return False
    form = (block.time_emb_proj, block.time_embedding_norm == "scale_shift", block.dropout.p, block.output_scale_factor)
    norms = all(_norm_fits(norm, block.nonlinearity) for norm in (block.norm1, block.norm2))
    return form == (None, False, 0, 1) and norms and convolution_fits(block.conv1) and convolution_fits(block.conv2)


def _res_block_fits(block: Any) -> bool:
    convolutions = convolution_fits(block.conv1) and convolution_fits(block.conv2)
    return convolutions and isinstance(block.nonlinearity, nn.SiLU) and block.norm_type == "rms_norm"


def _norm_fits(norm: Any, activation: Any) -> bool:
    """Whether the kernel computes this norm and the activation after it."""
    if not isinstance(norm, nn.GroupNorm) or not isinstance(activation, nn.SiLU) or not norm.affine:
        return False
    return norm.num_channels.bit_count() == 1


def _is_wide(attn: Any) -> bool:
    """Whether a diffusers attention is that of an autoencoder: one wide head over pixels, with a plain group norm."""
    from diffusers.models.attention_processor import AttnProcessor2_0

    plain = attn.spatial_norm is attn.norm_cross is attn.norm_q is attn.norm_k is None
    usual = type(attn.processor) is AttnProcessor2_0 and attn.group_norm is not None
    form = (attn.heads, attn.residual_connection, attn.rescale_output_factor, attn.scale)
    return plain and usual and form == (1, True, 1, attn.inner_dim**-0.5)
