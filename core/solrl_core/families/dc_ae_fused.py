"""EfficientViT blocks of SANA's autoencoder for a GPU: diffusers' arithmetic in fewer passes over memory."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.sana_fused import FusedFeedForward
from solrl_core.kernels.depthwise_taps import SIDES, depthwise, packed_taps
from solrl_core.kernels.multiscale_attention import HEAD_SIZE, multiscale_attention


class FusedGatedConvolution(FusedFeedForward):
    """Fused `GLUMBConv` of diffusers with norm and residual."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C, H, W], both channels-last in memory."""
        normed: Tensor = self.norm(super().forward(x).movedim(1, -1))
        return normed.movedim(-1, 1) + x


class FusedAttentionBlock(nn.Module):
    """`EfficientViTBlock` of diffusers; shares its weights and packs copies of the weights before the attention.

    Not differentiable. Images of at most `HEAD_SIZE` pixels keep diffusers' attention, which is quadratic for these.
    """

    qkv: Tensor

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.attn = block.attn
        self.conv_out = FusedGatedConvolution(block.conv_out)
        attn = block.attn
        layers = (attn.to_q, attn.to_k, attn.to_v)
        self.register_buffer("qkv", torch.cat([layer.weight.detach() for layer in layers]), persistent=False)
        for i, scale in enumerate(attn.to_qkv_multiscale):
            self.register_buffer(f"taps_{i}", packed_taps(scale.proj_in.weight.detach()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C, H, W], both channels-last in memory."""
        attended = self._attended(x) if x.shape[-2] * x.shape[-1] > HEAD_SIZE else self.attn(x)
        out: Tensor = self.conv_out(attended)
        return out

    def _attended(self, x: Tensor) -> Tensor:
        attn = self.attn
        pixels = x.movedim(1, -1)
        qkv = F.linear(pixels, self.qkv)
        scaled = [depthwise(qkv, self.get_buffer(f"taps_{i}")) for i in range(len(attn.to_qkv_multiscale))]
        weights = [scale.proj_out.weight.view(-1, HEAD_SIZE, HEAD_SIZE) for scale in attn.to_qkv_multiscale]
        attended = multiscale_attention(qkv.flatten(1, 2), [part.flatten(1, 2) for part in scaled], weights)
        out: Tensor = attn.norm_out(attn.to_out(attended).view(pixels.shape)) + pixels
        return out.movedim(-1, 1)


def fused_block(block: nn.Module) -> nn.Module | None:
    """A fused version of a diffusers `EfficientViTBlock`, or None if `block` is not one that fits."""
    from diffusers.models.autoencoders.autoencoder_dc import EfficientViTBlock

    if not isinstance(block, EfficientViTBlock):
        return None
    middle_fits = block.conv_out.norm is not None and block.conv_out.residual_connection
    return FusedAttentionBlock(block) if middle_fits and _attention_fits(block.attn) else None


def _attention_fits(attn: Any) -> bool:
    from diffusers.models.attention_processor import SanaMultiscaleAttnProcessor2_0

    form = (attn.attention_head_dim, attn.norm_type, attn.residual_connection, attn.eps)
    usual = type(attn.processor) is SanaMultiscaleAttnProcessor2_0 and type(attn.nonlinearity) is nn.ReLU
    linears = all(type(layer) is nn.Linear for layer in (attn.to_q, attn.to_k, attn.to_v, attn.to_out))
    sides = [scale.proj_in.kernel_size[0] for scale in attn.to_qkv_multiscale]
    equal_widths = attn.to_q.in_features == attn.to_out.out_features
    return (
        usual
        and linears
        and equal_widths
        and form == (HEAD_SIZE, "rms_norm", True, 1e-15)
        and bool(sides)
        and all(side in SIDES for side in sides)
    )
