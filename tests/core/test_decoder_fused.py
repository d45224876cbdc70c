"""Decoders with fused modules, and the operations of these, against diffusers and torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC, AutoencoderKL
from diffusers.models.autoencoders.autoencoder_dc import EfficientViTBlock, ResBlock
from diffusers.models.normalization import RMSNorm
from diffusers.models.resnet import ResnetBlock2D
from solrl_core.families import decoder_fused, load_backbone
from solrl_core.families.dc_ae_fused import FusedAttentionBlock, fused_block
from solrl_core.families.decoder_fused import (
    Convolution,
    DCResBlock,
    NormSilu,
    PixelAttention,
    ResnetBlock,
    UpBlock,
    fused_decoder,
)
from solrl_core.fingerprint import module_digest
from solrl_core.kernels.convolve import convolve, convolve_norm, packed_weight, plain_convolve, plain_convolve_norm
from solrl_core.kernels.depthwise_taps import depthwise, packed_taps, plain_depthwise
from solrl_core.kernels.group_norm import group_norm_silu
from solrl_core.kernels.multiscale_attention import multiscale_attention, plain_multiscale_attention
from solrl_core.kernels.wide_attention import wide_attention
from tests.core.gpu_marks import HOPPER, relative
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("inference")


def reference(x: Tensor, weight: Tensor, bias: Tensor, enlarge: bool, silu: bool) -> Tensor:
    out = F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest") if enlarge else x, weight, bias, padding=1)
    return F.silu(out) if silu else out


def given(count: int, channels: int, height: int, width: int, out: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(count, channels, height, width).to(memory_format=torch.channels_last)
    return x, torch.randn(out, channels, 3, 3) / (3 * channels**0.5), torch.randn(out)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("enlarge", [False, True])
@pytest.mark.parametrize(("height", "width"), [(5, 7), (1, 1), (2, 8)])
def test_packed_weights_convolve_as_torch_does(enlarge: bool, silu: bool, height: int, width: int) -> None:
    x, weight, bias = given(2, 3, height, width, 4)
    found = convolve(x, packed_weight(weight, enlarge=enlarge), bias, enlarge, silu)
    torch.testing.assert_close(found, reference(x, weight, bias, enlarge, silu), atol=1e-5, rtol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_a_convolution_normalises_and_adds_as_diffusers_does() -> None:
    x, weight, bias = given(2, 3, 5, 7, 4)
    residual = torch.randn(2, 4, 5, 7).to(memory_format=torch.channels_last)
    norm = RMSNorm(4, 1e-5, bias=True)
    norm.weight.copy_(torch.randn(4))
    norm.bias.copy_(torch.randn(4))
    expected = norm(F.conv2d(x, weight, bias, padding=1).movedim(1, -1)).movedim(-1, 1) + residual
    found = convolve_norm(x, packed_weight(weight, enlarge=False), bias, norm.weight, norm.bias, 1e-5, residual)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_weights_of_an_enlarged_image_add_up_in_float32() -> None:
    """In BF16, 1 + 2**-9 - 1 is 0."""
    weight = torch.zeros(1, 1, 3, 3, dtype=torch.bfloat16)
    weight[0, 0, 1:, 1:] = torch.tensor([[1, -1], [2**-9, 0]])
    assert packed_weight(weight, enlarge=True)[0].tolist() == [0, 0, 0, 2**-9]


def kl() -> AutoencoderKL:
    """Wide enough for the kernel in all but its middle; the last block has no upsampling."""
    return AutoencoderKL(
        block_out_channels=(128, 256),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    )


def dc(**changes: Any) -> AutoencoderDC:
    settings: dict[str, Any] = {"decoder_block_out_channels": (128, 128, 256), "decoder_layers_per_block": (1, 1, 1)}
    settings |= {"encoder_block_out_channels": (128, 128, 256), "encoder_layers_per_block": (1, 1, 1)}
    for part in ("encoder", "decoder"):
        settings[f"{part}_block_types"] = ("ResBlock", "ResBlock", "EfficientViTBlock")
        settings[f"{part}_qkv_multiscales"] = ((), (), (5,))
    settings |= {"latent_channels": 8, "attention_head_dim": 32, "upsample_block_type": "interpolate"}
    return AutoencoderDC(**settings | changes)


def counts(module: nn.Module) -> list[int]:
    kinds = (Convolution, UpBlock, NormSilu, PixelAttention, ResnetBlock, DCResBlock)
    return [sum(isinstance(part, kind) for part in module.modules()) for kind in kinds]


@pytest.mark.parametrize(
    ("build", "latents", "expected"),
    [
        (kl, (1, 4, 64, 64), [13, 1, 13, 1, 6, 0]),
        (kl, (2, 4, 8, 12), [13, 1, 13, 1, 6, 0]),  # narrower than the kernel's
        (dc, (1, 8, 32, 32), [6, 2, 0, 0, 0, 2]),
        (dc, (1, 8, 8, 40), [6, 2, 0, 0, 0, 2]),
    ],
)
def test_a_fused_decoder_agrees(build: Callable[[], nn.Module], latents: tuple[int, ...], expected: list[int]) -> None:
    vae = build().eval().to(memory_format=torch.channels_last)
    before = module_digest(vae)
    fused = fused_decoder(vae)
    assert counts(fused) == expected
    assert not any(counts(vae))
    given = torch.randn(latents)
    found, wanted = (module.decode(given, return_dict=False)[0] for module in (fused, vae))
    assert torch.linalg.norm(found - wanted) < 1e-5 * torch.linalg.norm(wanted)
    assert module_digest(vae) == before
    shared = {weight.data_ptr() for weight in vae.parameters()}
    assert all(weight.data_ptr() in shared for weight in fused.parameters())


def test_a_backbone_decodes_by_fused_modules_in_bf16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("mini-sd3")
    monkeypatch.setattr(decoder_fused, "has_descriptors", lambda device: True)
    backbone.compile_decoder()
    assert backbone._vae is backbone.parts["vae"]
    backbone.parts["vae"].bfloat16()
    backbone.compile_decoder()
    fused = backbone._vae
    assert fused is not backbone.parts["vae"]
    backbone.compile_decoder()
    assert backbone._vae is fused


def test_other_convolutions_stay_torchs() -> None:
    parts = {
        "strided": nn.Conv2d(64, 128, 3, stride=2, padding=1),
        "unpadded": nn.Conv2d(64, 128, 3),
        "pointwise": nn.Conv2d(64, 128, 1),
        "grouped": nn.Conv2d(64, 128, 3, padding=1, groups=2),
        "reflected": nn.Conv2d(64, 128, 3, padding=1, padding_mode="reflect"),
        "to colours": nn.Conv2d(128, 3, 3, padding=1),
        "of few channels": nn.Conv2d(16, 128, 3, padding=1),
    }
    holder = nn.Module()
    holder.decoder = nn.ModuleDict(parts)
    assert not any(counts(fused_decoder(holder)))
    holder.decoder["fits"] = nn.Conv2d(64, 128, 3, padding=1)
    assert counts(fused_decoder(holder))[0] == 1


@pytest.mark.parametrize(
    "settings",
    [
        *({"temb_channels": 8}, {"output_scale_factor": 2.0}, {"dropout": 0.1}, {"up": True}),
        *({"non_linearity": "relu"}, {"conv_2d_out_channels": 96}),
    ],
)
def test_other_resnet_blocks_stay_diffusers(settings: dict[str, Any]) -> None:
    def fused(**settings: Any) -> int:
        holder = nn.Module()
        holder.decoder = nn.ModuleList([ResnetBlock2D(**{"in_channels": 128, "temb_channels": None, **settings})])
        return counts(fused_decoder(holder))[4]

    assert fused(**settings) == 0
    assert fused() == 1


@HOPPER
@pytest.mark.parametrize(("enlarge", "silu"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("channels", "out"), [(64, 128), (128, 128), (512, 256), (256, 512)])
@pytest.mark.parametrize(("height", "width"), [(3, 64), (2, 72), (5, 128), (2, 300)])
def test_the_kernel_equals_torch(enlarge: bool, silu: bool, channels: int, out: int, height: int, width: int) -> None:
    x, weight, bias = (part.bfloat16() for part in given(2, channels, height, width, out))
    weight = packed_weight(weight, enlarge=enlarge)
    expected = plain_convolve(x.float(), weight.float(), bias.float(), enlarge, silu)
    found = convolve(x.cuda(), weight.cuda(), bias.cuda(), enlarge, silu).cpu().float()
    assert torch.linalg.norm(found - expected) < 3e-3 * torch.linalg.norm(expected)


@HOPPER
@pytest.mark.parametrize(("channels", "out"), [(64, 128), (128, 128), (256, 256)])
@pytest.mark.parametrize(("height", "width"), [(2, 72), (5, 128)])
def test_the_kernel_normalises(channels: int, out: int, height: int, width: int) -> None:
    x, weight, bias = (part.bfloat16() for part in given(2, channels, height, width, out))
    residual = torch.randn(2, out, height, width).bfloat16().to(memory_format=torch.channels_last)
    norm = torch.randn(out).bfloat16(), torch.randn(out).bfloat16(), 1e-5, residual
    packed = packed_weight(weight, enlarge=False)
    expected = plain_convolve_norm(x, packed, bias.float(), *norm)
    moved = [part.cuda() if isinstance(part, Tensor) else part for part in (x, packed, bias, *norm)]
    assert relative(convolve_norm(*moved).cpu(), expected) < 4e-3


@HOPPER
@pytest.mark.parametrize(("channels", "groups"), [(128, 32), (256, 32), (512, 32), (64, 8), (1024, 32)])
@pytest.mark.parametrize(("height", "width"), [(128, 128), (3, 5), (50, 41)])
def test_the_kernels_group_norm_equals_torchs(channels: int, groups: int, height: int, width: int) -> None:
    x = (3 * torch.randn(2, channels, height, width) + 5).bfloat16().to(memory_format=torch.channels_last)
    weight, bias = torch.randn(channels).bfloat16(), torch.randn(channels).bfloat16()
    expected = F.silu(F.group_norm(x.float(), groups, weight.float(), bias.float(), 1e-6))
    found = group_norm_silu(x.cuda(), groups, weight.cuda(), bias.cuda(), 1e-6).cpu().float()
    assert torch.linalg.norm(found - expected) < 3e-3 * torch.linalg.norm(expected)


@HOPPER
@pytest.mark.parametrize(("queries", "keys"), [(4096, 4096), (5000, 300), (7, 1)])
def test_the_kernels_wide_attention_equals_torchs(queries: int, keys: int) -> None:
    query, key, value = (torch.randn(2, count, 512).bfloat16() for count in (queries, keys, keys))
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    found = wide_attention(query.cuda(), key.cuda(), value.cuda()).cpu().float()
    assert torch.linalg.norm(found - expected) < 1e-2 * torch.linalg.norm(expected)


@HOPPER
@pytest.mark.parametrize(("build", "latents"), [(kl, (2, 4, 64, 72)), (kl, (2, 4, 8, 40)), (dc, (1, 8, 32, 32))])
def test_a_fused_decoder_on_a_gpu_equals_diffusers(build: Callable[[], nn.Module], latents: tuple[int, ...]) -> None:
    vae, given = build().eval().bfloat16().float(), torch.randn(latents)
    expected = vae.decode(given.bfloat16().float(), return_dict=False)[0]
    fused = fused_decoder(vae.cuda().bfloat16().to(memory_format=torch.channels_last))
    found = fused.decode(given.cuda().bfloat16(), return_dict=False)[0].cpu().float()
    plain = vae.decode(given.cuda().bfloat16(), return_dict=False)[0].cpu().float()
    error, usual = (torch.linalg.norm(x - expected) / torch.linalg.norm(expected) for x in (found, plain))
    assert error < 1.2 * usual


def block_of(channels: int, sides: tuple[int, ...], size: int = 32, norm: str = "rms_norm") -> EfficientViTBlock:
    block = EfficientViTBlock(channels, attention_head_dim=size, qkv_multiscales=sides, norm_type=norm).eval()
    for parameter in block.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return block


def image(count: int, channels: int, height: int, width: int) -> Tensor:
    return torch.randn(count, channels, height, width).to(memory_format=torch.channels_last)


def fused(block: nn.Module) -> FusedAttentionBlock:
    found = fused_block(block)
    assert isinstance(found, FusedAttentionBlock)
    return found


@pytest.mark.parametrize("sides", [(5,), (3, 5)])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(7, 9), (16, 16), (3, 11), (4, 8), (1, 1)])
def test_a_fused_block_equals_diffusers(sides: tuple[int, ...], count: int, height: int, width: int) -> None:
    block, x = block_of(64, sides), image(count, 64, height, width)
    found = fused(block)(x)
    assert relative(found, block(x)) < 1e-5
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert relative(fused(block)(x.contiguous()), block(x)) < 1e-5


def test_other_blocks_are_not_fused() -> None:
    cut = block_of(64, (5,))
    cut.attn.residual_connection = False
    others: list[nn.Module] = [
        *(block_of(64, (5,), size=16), block_of(64, (5,), norm="batch_norm"), block_of(64, ()), block_of(64, (5, 7))),
        ResBlock(64, 64, norm_type="rms_norm", act_fn="silu"),
        cut,
    ]
    assert [fused_block(block) for block in others] == [None] * len(others)


@pytest.mark.parametrize("sides", [(5,), (3, 5)])
def test_a_fused_block_is_one_graph(sides: tuple[int, ...]) -> None:
    own, x = fused(block_of(64, sides)), image(2, 64, 7, 9)
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True, dynamic=False)
    assert relative(compiled(x), own(x)) < 1e-5


@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("side", [3, 5])
@pytest.mark.parametrize(
    "shape", [(3, 128, 128, 1536), (3, 32, 32, 3072), (1, 5, 7, 96), (2, 3, 1, 192), (2, 1, 130, 160)]
)
def test_the_depthwise_kernel_equals_torch(shape: tuple[int, ...], side: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype)
    taps = packed_taps(torch.randn(shape[-1], 1, side, side, device="cuda", dtype=dtype))
    expected = plain_depthwise(x.double(), taps.double())
    assert relative(depthwise(x, taps), expected) < (3e-3 if dtype == torch.bfloat16 else 1e-6)


def scales(count: int, tokens: int, heads: int, further: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    qkv, *scaled = torch.randn(1 + further, count, tokens, 96 * heads).bfloat16()
    weights = torch.randn(further, 3 * heads, 32, 32) / 32**0.5
    return qkv, scaled, list(weights.bfloat16())


@HOPPER
@pytest.mark.parametrize("further", [1, 2])
@pytest.mark.parametrize(
    ("count", "tokens", "heads"), [(3, 16384, 16), (3, 1024, 32), (1, 63, 2), (2, 130, 1), (1, 2500, 3), (1, 33, 40)]
)
def test_the_multiscale_kernels_equal_torch(count: int, tokens: int, heads: int, further: int) -> None:
    qkv, scaled, weights = scales(count, tokens, heads, further)
    there = [x.cuda() for x in scaled], [weight.cuda() for weight in weights]
    # Of the plain twin, projections are rounded to BF16 as in the kernel.
    expected = plain_multiscale_attention(qkv.cuda(), *there)
    found = multiscale_attention(qkv.cuda(), *there)
    assert relative(found, expected) < 4e-3
    assert torch.equal(multiscale_attention(qkv.cuda(), *there), found)


@HOPPER
@pytest.mark.parametrize(("channels", "size"), [(512, 128), (1024, 32), (64, 9)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_fused_block_on_a_gpu_equals_diffusers(channels: int, size: int, compiled: bool) -> None:
    block, x = block_of(channels, (5,)).bfloat16(), image(3, channels, size, size).bfloat16()
    expected = copy.deepcopy(block).cuda().float()(x.cuda().float())
    block = block.cuda().to(memory_format=torch.channels_last)
    own = fused(block)
    if compiled:
        own.compile(dynamic=False)
    found, plain = own(x.cuda()), block(x.cuda())
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert relative(found, expected) < 1.2 * relative(plain, expected)
