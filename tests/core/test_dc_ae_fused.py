"""Fused EfficientViT blocks of SANA's autoencoder and their operations, against diffusers and torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_dc import EfficientViTBlock, ResBlock
from gpu_marks import HOPPER, relative
from solrl_core.families.dc_ae_fused import FusedAttentionBlock, fused_block
from solrl_core.fingerprint import module_digest
from solrl_core.kernels.depthwise_taps import depthwise, packed_taps, plain_depthwise
from solrl_core.kernels.multiscale_attention import multiscale_attention, plain_multiscale_attention
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("inference")


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


def test_a_fused_block_takes_channels_first() -> None:
    block, x = block_of(64, (5,)), torch.randn(2, 64, 7, 9)
    assert relative(fused(block)(x), block(x)) < 1e-5


def test_a_fused_block_shares_its_weights_and_leaves_the_original_alone() -> None:
    block, x = block_of(64, (3, 5)), image(1, 64, 6, 7)
    before, expected = module_digest(block), block(x)
    own = fused(block)
    own(x)
    assert module_digest(block) == before
    assert torch.equal(block(x), expected)
    state, original = own.state_dict(), block.state_dict()
    assert state.keys() == original.keys()
    assert all(state[name].data_ptr() == tensor.data_ptr() for name, tensor in original.items())


def test_other_blocks_are_not_fused() -> None:
    cut = block_of(64, (5,))
    cut.attn.residual_connection = False
    others: list[nn.Module] = [
        block_of(64, (5,), size=16),
        block_of(64, (5,), norm="batch_norm"),
        block_of(64, ()),
        block_of(64, (5, 7)),
        ResBlock(64, 64, norm_type="rms_norm", act_fn="silu"),
        cut,
    ]
    assert [fused_block(block) for block in others] == [None] * len(others)


@pytest.mark.parametrize("sides", [(5,), (3, 5)])
def test_a_fused_block_is_one_graph(sides: tuple[int, ...]) -> None:
    own, x = fused(block_of(64, sides)), image(2, 64, 7, 9)
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True, dynamic=False)
    assert relative(compiled(x), own(x)) < 1e-5


@pytest.mark.parametrize("side", [1, 3, 5, 7])
def test_the_depthwise_convolution_equals_torchs(side: int) -> None:
    x, weight = torch.randn(2, 5, 7, 6), torch.randn(6, 1, side, side)
    expected = F.conv2d(x.movedim(-1, 1), weight, padding=side // 2, groups=6).movedim(1, -1)
    torch.testing.assert_close(depthwise(x, packed_taps(weight)), expected)


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
