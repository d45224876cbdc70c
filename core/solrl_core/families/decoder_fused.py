"""Decoders of autoencoders for a GPU: diffusers' arithmetic, up to rounding, in faster kernels.

3×3 convolutions run as matrix products, without enlarging an image first. A group norm and the SiLU after
it are one operation.
"""

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.dc_ae_fused import fused_block
from solrl_core.kernels import convolve, group_norm_silu, wide_attention
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

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        if x.shape[-1] >= WIDTH:
            return convolve(x, self.packed, self.bias, self.enlarge)
        convolved: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest") if self.enlarge else x)
        return convolved


class NormSilu(nn.Module):
    """A group norm and the SiLU after it, [B, C, H, W]."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and activate."""
        norm = self.norm
        return group_norm_silu(x, norm.weight, norm.bias, norm.num_groups, norm.eps)


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
    for name, child in module.named_children():
        if (fused := _fused(child)) is not None:
            setattr(module, name, fused)
            continue
        _replace(child)
        _fuse_norms(child)


def _fuse_norms(block: Any) -> None:
    """Fuse the norms of diffusers' `ResnetBlock2D` with the activation after each."""
    from diffusers.models.resnet import ResnetBlock2D

    if not isinstance(block, ResnetBlock2D) or block.time_emb_proj is not None:
        return
    if _norm_fits(block.norm1, block.nonlinearity) and _norm_fits(block.norm2, block.nonlinearity):
        block.norm1, block.norm2, block.nonlinearity = NormSilu(block.norm1), NormSilu(block.norm2), nn.Identity()


def _fused(module: Any) -> nn.Module | None:
    from diffusers.models.attention_processor import Attention
    from diffusers.models.autoencoders.autoencoder_dc import DCUpBlock2d
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
    return Convolution(module) if isinstance(module, nn.Conv2d) and _convolution_fits(module) else None


def _convolution_fits(conv: Any) -> bool:
    """Whether the kernel computes this convolution."""
    if not isinstance(conv, nn.Conv2d):
        return False
    form = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    sizes = conv.in_channels % CHANNELS_IN, conv.out_channels % CHANNELS_OUT
    return form == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros") and sizes == (0, 0)


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
