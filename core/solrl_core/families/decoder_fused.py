"""Decoders of autoencoders for a GPU: diffusers' arithmetic, up to rounding, in faster kernels.

3×3 convolutions run as matrix products, without enlarging an image first. An activation after one, or SANA's norm and
residual, is computed with it, before its result leaves for memory. A group norm and the SiLU after it are one
operation.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.dc_ae_fused import fused_block
from solrl_core.kernels.convolve import (
    CHANNELS_IN,
    CHANNELS_OUT,
    NORM_CHANNELS,
    WIDTH,
    convolve,
    convolve_norm,
    packed_weight,
    plain_convolve_norm,
)
from solrl_core.kernels.group_norm import group_norm_silu
from solrl_core.kernels.operation import has_descriptors
from solrl_core.kernels.wide_attention import wide_attention
from solrl_core.precision.fuse import Mapped


class Convolution(nn.Module):
    """A 3×3 convolution [B, C, H, W] → [B, O, H, W], built from torch's module, whose weights it shares.

    With `enlarge`, the image is made twice as high and wide by nearest neighbours before, and the weights are packed
    again. Narrow images keep torch's arithmetic.
    """

    packed: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, *, enlarge: bool = False) -> None:
        super().__init__()
        self.enlarge = enlarge
        self.conv = conv
        weight = conv.weight.detach()
        bias = weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias.detach()
        self.register_buffer("packed", packed_weight(weight, enlarge=enlarge), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor, *, silu: bool = False) -> Tensor:
        """Convolve; with `silu`, activate."""
        if x.shape[-1] >= WIDTH:
            return convolve(x, self.packed, self.bias, self.enlarge, silu)
        convolved: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest") if self.enlarge else x)
        return F.silu(convolved) if silu else convolved

    def with_norm(self, x: Tensor, norm: Any, residual: Tensor) -> Tensor:
        """Convolve without enlarging, normalise by diffusers' `RMSNorm` and add, as `convolve_norm` does."""
        run = convolve_norm if x.shape[-1] >= WIDTH else plain_convolve_norm
        return run(x, self.packed, self.bias, norm.weight, norm.bias, norm.eps, residual)


class NormSilu(nn.Module):
    """A group norm and the SiLU after it, [B, C, H, W]."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, norm.eps)


class ResnetBlock(nn.Module):
    """`ResnetBlock2D` of diffusers without a time embedding."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.conv1 = NormSilu(block.norm1), Convolution(block.conv1)
        self.norm2, self.conv2 = NormSilu(block.norm2), Convolution(block.conv2)
        self.conv_shortcut = block.conv_shortcut

    def forward(self, hidden_states: Tensor, temb: None = None) -> Tensor:
        """Convolve twice, each time after a norm, and add the input: [B, C, H, W] → [B, O, H, W]."""
        hidden = self.conv1(self.norm1(hidden_states))
        shortcut = hidden_states if self.conv_shortcut is None else self.conv_shortcut(hidden_states)
        out: Tensor = self.conv2(self.norm2(hidden)) + shortcut
        return out


class DCResBlock(nn.Module):
    """`ResBlock` of diffusers' `AutoencoderDC`, [B, C, H, W]."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv1, self.conv2 = Convolution(block.conv1), Convolution(block.conv2)
        self.norm = block.norm
        affine = block.norm.weight is not None and block.norm.bias is not None
        self._at_once = affine and block.conv2.out_channels in NORM_CHANNELS

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Convolve twice, normalise each pixel, and add the input."""
        activated = self.conv1(hidden_states, silu=True)
        if self._at_once:
            return self.conv2.with_norm(activated, self.norm, hidden_states)
        normed: Tensor = self.norm(self.conv2(activated).movedim(1, -1)).movedim(-1, 1)
        return normed + hidden_states


class UpBlock(nn.Module):
    """`Upsample2D` of diffusers with a convolution, or `DCUpBlock2d`, which adds its input, channels become pixels."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv = Convolution(block.conv, enlarge=True)
        self._repeats: int = block.repeats if getattr(block, "shortcut", False) else 0

    def forward(self, hidden_states: Tensor, output_size: None = None) -> Tensor:
        """[B, C, H, W] → [B, O, 2·H, 2·W]."""
        out: Tensor = self.conv(hidden_states)
        if self._repeats:
            out = out + F.pixel_shuffle(hidden_states.repeat_interleave(self._repeats, dim=1), 2)
        return out


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


def decodes_images(vae: nn.Module) -> bool:
    """Whether an autoencoder is of images, with four axes; one of videos has five."""
    return all(parameter.ndim < 5 for parameter in vae.parameters())


def has_decoder_kernels(vae: Any) -> bool:
    """Whether fused modules decode: from Hopper on, in BF16."""
    return bool(vae.dtype == torch.bfloat16 and has_descriptors(vae.device))


def fused_decoder(vae: nn.Module) -> nn.Module:
    """A copy of an autoencoder whose decoder has this module's parts where they fit; it shares all weights.

    The parts are not differentiable.
    """
    fused = copy.deepcopy(vae, {id(tensor): tensor for tensor in (*vae.parameters(), *vae.buffers())})
    decoder = fused.get_submodule("decoder")
    _replace(decoder)
    if _norm_fits(getattr(decoder, "conv_norm_out", None), getattr(decoder, "conv_act", None)):
        decoder.conv_norm_out, decoder.conv_act = NormSilu(decoder.conv_norm_out), nn.Identity()  # type: ignore[arg-type]
    if hasattr(decoder, "norm_out") and isinstance(getattr(decoder, "conv_act", None), nn.ReLU):
        # Compiled, the norm and the ReLU are one pass over memory.
        decoder.norm_out, decoder.conv_act = Mapped(decoder.norm_out, F.relu), nn.Identity()  # type: ignore[arg-type]
    return fused


def _replace(module: nn.Module) -> None:
    for name, child in module.named_children():
        if (fused := _fused(child)) is not None:
            setattr(module, name, fused)
        else:
            _replace(child)


def _fused(module: Any) -> nn.Module | None:
    from diffusers.models.attention_processor import Attention
    from diffusers.models.autoencoders.autoencoder_dc import DCUpBlock2d, ResBlock
    from diffusers.models.upsampling import Upsample2D

    if (block := fused_block(module)) is not None:
        return block
    enlarges = isinstance(module, Upsample2D) and module.norm is None
    enlarges |= isinstance(module, DCUpBlock2d) and module.interpolation_mode == "nearest"
    if enlarges and module.interpolate and convolution_fits(module.conv):
        return UpBlock(module)
    if isinstance(module, Attention) and _is_wide(module):
        return PixelAttention(module)
    if _resnet_fits(module):
        return ResnetBlock(module)
    if isinstance(module, ResBlock) and _res_block_fits(module):
        return DCResBlock(module)
    return Convolution(module) if convolution_fits(module) else None


def convolution_fits(conv: Any) -> bool:
    """Whether the kernel computes this convolution."""
    if not isinstance(conv, nn.Conv2d):
        return False
    form = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    usual = form == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")
    return usual and (conv.in_channels % CHANNELS_IN, conv.out_channels % CHANNELS_OUT) == (0, 0)


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
