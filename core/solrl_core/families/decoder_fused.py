"""Decoders of autoencoders for a GPU: diffusers' arithmetic, up to rounding, in faster kernels.

3×3 convolutions run as matrix products, without enlarging an image first. What follows one — an activation, the
addition of a residual, the moments of a group norm — is computed with it, before its result leaves for memory. A group
norm and the SiLU after it are one operation.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.dc_ae_fused import fused_block
from solrl_core.kernels import convolve, convolve_moments, group_moments, group_norm_silu, wide_attention
from solrl_core.kernels.convolve import CHANNELS_IN, CHANNELS_OUT, WIDTH, packed_weight


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

    def with_moments(self, x: Tensor, residual: Tensor | None, groups: int) -> tuple[Tensor, Tensor]:
        """Convolve without enlarging, add the residual, and measure moments as `convolve_moments` does."""
        if x.shape[-1] >= WIDTH:
            return convolve_moments(x, self.packed, self.bias, residual, groups)
        convolved: Tensor = self.conv(x)
        out = convolved if residual is None else convolved + residual
        return out, group_moments(out, groups)


class NormSilu(nn.Module):
    """A group norm and the SiLU after it, [B, C, H, W], of images whose moments may be known."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm
        self.groups = norm.num_groups

    def forward(self, x: Tensor, moments: Tensor | None = None) -> Tensor:
        """Normalise and activate."""
        if moments is None:
            moments = group_moments(x, self.groups)
        return group_norm_silu(x, moments, self.norm.weight, self.norm.bias, self.norm.eps)


class ResnetBlock(nn.Module):
    """`ResnetBlock2D` of diffusers without a time embedding, [B, C, H, W] → [B, O, H, W].

    It takes the moments for its first norm, and returns those of its result in `groups` groups.
    """

    def __init__(self, block: Any, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = NormSilu(block.norm1), Convolution(block.conv1)
        self.norm2, self.conv2 = NormSilu(block.norm2), Convolution(block.conv2)
        self.conv_shortcut = block.conv_shortcut
        self.groups = groups

    def forward(self, x: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve twice, each time after a norm, and add the input."""
        hidden, inner = self.conv1.with_moments(self.norm1(x, moments), None, self.norm2.groups)
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x)
        return self.conv2.with_moments(self.norm2(hidden, inner), shortcut, self.groups)


class ResnetBlocks(nn.Module):
    """Consecutive `ResnetBlock2D` of diffusers; each measures the moments for the next one's norm."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        super().__init__()
        self.groups: int = blocks[0].norm1.num_groups
        following = [*(block.norm1.num_groups for block in blocks[1:]), 0]
        self.blocks = nn.ModuleList(map(ResnetBlock, blocks, following))

    def forward(self, hidden_states: Tensor, temb: None = None) -> Tensor:
        """[B, C, H, W] → [B, O, H, W]."""
        moments = group_moments(hidden_states, self.groups)
        for block in self.blocks:
            hidden_states, moments = block(hidden_states, moments)
        return hidden_states


class DCResBlock(nn.Module):
    """`ResBlock` of diffusers' `AutoencoderDC`, [B, C, H, W]."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv1, self.conv2 = Convolution(block.conv1), Convolution(block.conv2)
        self.norm = block.norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Convolve twice, normalise each pixel, and add the input."""
        hidden = self.conv2(self.conv1(hidden_states, silu=True))
        normed: Tensor = self.norm(hidden.movedim(1, -1)).movedim(-1, 1)
        return normed + hidden_states


class Upsample(nn.Module):
    """`Upsample2D` of diffusers with a convolution."""

    def __init__(self, upsample: Any) -> None:
        super().__init__()
        self.conv = Convolution(upsample.conv, enlarge=True)

    def forward(self, hidden_states: Tensor, output_size: None = None) -> Tensor:
        """[B, C, H, W] → [B, O, 2·H, 2·W]."""
        out: Tensor = self.conv(hidden_states)
        return out


class UpBlock(nn.Module):
    """`DCUpBlock2d` of diffusers, which adds its input with channels rearranged to pixels."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv = Convolution(block.conv, enlarge=True)
        self._repeats: int = block.repeats
        self._shortcut: bool = block.shortcut

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, C, H, W] → [B, O, 2·H, 2·W]."""
        out: Tensor = self.conv(hidden_states)
        if self._shortcut:
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


def fused_decoder(vae: nn.Module) -> nn.Module:
    """A copy of an autoencoder whose decoder has this module's parts where they fit; it shares all weights.

    The parts are not differentiable.
    """
    tensors = [*vae.parameters(), *vae.buffers()]
    own = copy.deepcopy(vae, {id(tensor): tensor for tensor in tensors})
    decoder = own.get_submodule("decoder")
    _replace(decoder)
    if _norm_fits(getattr(decoder, "conv_norm_out", None), getattr(decoder, "conv_act", None)):
        decoder.conv_norm_out, decoder.conv_act = NormSilu(decoder.conv_norm_out), nn.Identity()  # type: ignore[arg-type]
    return own


def _replace(module: nn.Module) -> None:
    from diffusers.models.unets.unet_2d_blocks import UpDecoderBlock2D

    if isinstance(module, UpDecoderBlock2D) and all(map(_resnet_fits, module.resnets)):
        module.resnets = nn.ModuleList([ResnetBlocks(list(module.resnets))])
    for name, child in module.named_children():
        if (fused := _fused(child)) is not None:
            setattr(module, name, fused)
        elif not isinstance(child, ResnetBlocks):
            _replace(child)


def _fused(module: Any) -> nn.Module | None:
    from diffusers.models.attention_processor import Attention
    from diffusers.models.autoencoders.autoencoder_dc import DCUpBlock2d, ResBlock
    from diffusers.models.upsampling import Upsample2D

    if (block := fused_block(module)) is not None:
        return block
    conv = getattr(module, "conv", None)
    if isinstance(module, Upsample2D) and module.interpolate and module.norm is None and _convolution_fits(conv):
        return Upsample(module)
    if (
        isinstance(module, DCUpBlock2d)
        and module.interpolate
        and module.interpolation_mode == "nearest"
        and _convolution_fits(conv)
    ):
        return UpBlock(module)
    if isinstance(module, Attention) and _is_wide(module):
        return PixelAttention(module)
    if _resnet_fits(module):
        return ResnetBlocks([module])
    if isinstance(module, ResBlock) and _res_block_fits(module):
        return DCResBlock(module)
    return Convolution(module) if isinstance(module, nn.Conv2d) and _convolution_fits(module) else None


def _convolution_fits(conv: Any) -> bool:
    """Whether the kernel computes this convolution."""
    if not isinstance(conv, nn.Conv2d):
        return False
    form = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    sizes = conv.in_channels % CHANNELS_IN, conv.out_channels % CHANNELS_OUT
    return form == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros") and sizes == (0, 0)


def _resnet_fits(block: Any) -> bool:
    """Whether this is a `ResnetBlock2D` of an autoencoder that the kernels compute whole."""
    from diffusers.models.resnet import ResnetBlock2D

    if not isinstance(block, ResnetBlock2D) or block.upsample is not None or block.downsample is not None:
        return False
    form = (block.time_emb_proj, block.time_embedding_norm == "scale_shift", block.dropout.p, block.output_scale_factor)
    norms = all(
        # A program of the convolution measures whole groups, so none may have more channels than it computes.
        _norm_fits(norm, block.nonlinearity) and norm.num_channels <= norm.num_groups * CHANNELS_OUT
        for norm in (block.norm1, block.norm2)
    )
    return form == (None, False, 0, 1) and norms and _convolution_fits(block.conv1) and _convolution_fits(block.conv2)


def _res_block_fits(block: Any) -> bool:
    convolutions = _convolution_fits(block.conv1) and _convolution_fits(block.conv2)
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
