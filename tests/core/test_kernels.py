"""Fused operations against what diffusers computes; on a GPU, the kernels against torch's own operations."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.sana_transformer import GLUMBConv
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from solrl_core.batches import batches, sizes
from solrl_core.families.flux_attention import FusedAttention
from solrl_core.families.sana_feed_forward import FusedFeedForward
from solrl_core.kernels import E4M3_MAX, quantize_rows, rms_norm_rope, silu_depthwise_glu
from torch import Tensor

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def angles(count: int, size: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(count, size // 2).repeat_interleave(2, 1) * 6
    return angle.cos(), angle.sin()


def test_rows_come_back_within_half_a_code() -> None:
    x = torch.randn(3, 5, 64) * torch.logspace(-6, 6, 15).view(3, 5, 1)
    codes, scales = quantize_rows(x, "")
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.float().abs().amax(1).eq(E4M3_MAX).all()
    back = (codes.float() * scales).view_as(x)
    # Three bits of mantissa, and below the least normal number steps of 2**-9.
    assert ((back - x).abs() <= x.abs() / 16 + scales.view(3, 5, 1) * 2**-10).all()


def test_an_activation_is_that_of_torch() -> None:
    x = torch.randn(7, 32)
    codes, scales = quantize_rows(x, "gelu_tanh")
    expected, expected_scales = quantize_rows(F.gelu(x, approximate="tanh"), "")
    assert torch.equal(codes.float(), expected.float())
    assert torch.equal(scales, expected_scales)


def test_a_row_of_zeros_is_zeros() -> None:
    codes, scales = quantize_rows(torch.zeros(2, 16), "")
    assert codes.float().eq(0).all()
    assert scales.isfinite().all()


def test_norm_and_positions_are_those_of_diffusers() -> None:
    x, weight = torch.randn(2, 5, 3, 16), torch.rand(16)
    cos, sin = angles(9, 16)
    normed = F.rms_norm(x, (16,), weight, 1e-6)
    expected = apply_rotary_emb(normed, (cos[4:], sin[4:]), sequence_dim=1)
    assert torch.allclose(rms_norm_rope(x, weight, cos, sin, 4, 1e-6), expected, atol=1e-6)


@pytest.mark.parametrize("joint", [True, False])
def test_attention_is_that_of_diffusers(joint: bool) -> None:
    attention = FluxAttention(
        query_dim=32,
        added_kv_proj_dim=32 if joint else None,
        dim_head=16,
        heads=2,
        out_dim=32,
        context_pre_only=False if joint else None,
        pre_only=not joint,
        bias=True,
        eps=1e-6,
        processor=FluxAttnProcessor(),
    )
    for name, parameter in attention.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    x, text = torch.randn(2, 6, 32), torch.randn(2, 3, 32) if joint else None
    positions = angles(9 if joint else 6, 16)
    expected = attention(x, encoder_hidden_states=text, image_rotary_emb=positions)
    attention.set_processor(FusedAttention())
    got = attention(x, encoder_hidden_states=text, image_rotary_emb=positions)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_sana_s_feed_forward_is_that_of_diffusers() -> None:
    ff = GLUMBConv(8, 8, expand_ratio=2.5, norm_type=None, residual_connection=False)
    x = torch.randn(2, 5, 7, 8).movedim(-1, 1)
    assert torch.allclose(FusedFeedForward(copy.deepcopy(ff))(x), ff(x), atol=1e-5)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 18, 19, 24, 25, 30, 48, 97])
def test_a_gpu_s_batches_hold_each_row_once_and_are_of_two_sizes(count: int) -> None:
    made = batches(count, 24, torch.device("cuda"))
    assert [place for batch in made for place in batch.places[: batch.count]] == list(range(count))
    assert {len(batch.places) for batch in made} <= set(sizes(24))
    assert sum(len(batch.places) for batch in made) - count < sizes(24)[1]


@GPU
@pytest.mark.parametrize("activation", ["", "gelu_tanh"])
@pytest.mark.parametrize("length", [16, 320, 3072, 12288])
def test_the_rows_kernel(activation: str, length: int) -> None:
    x = torch.randn(2, 37, length, dtype=torch.bfloat16)
    for given in (x, x[:, 5:20], x.view(2, 37, -1, 16).transpose(1, 2)):
        expected, expected_scales = quantize_rows(given, activation)
        codes, scales = quantize_rows(given.cuda(), activation)
        assert torch.allclose(scales.cpu(), expected_scales, rtol=1e-5)
        assert (codes.cpu().float() != expected.float()).float().mean() < 0.002


@GPU
@pytest.mark.parametrize("heads", [2, 8, 24])
def test_the_norm_and_positions_kernel(heads: int) -> None:
    x, weight = torch.randn(2, 5, heads, 128), torch.rand(128)
    cos, sin = angles(9, 128)
    expected = rms_norm_rope(x, weight, cos, sin, 4, 1e-6)
    got = rms_norm_rope(x.cuda(), weight.cuda(), cos.cuda(), sin.cuda(), 4, 1e-6)
    assert torch.allclose(got.cpu(), expected, atol=1e-5)


@GPU
@pytest.mark.parametrize("shape", [(2, 5, 7, 48), (3, 8, 8, 320), (1, 1, 1, 16)])
def test_the_depthwise_kernel(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(shape[-1], 1, 3, 3), torch.randn(shape[-1])
    expected = silu_depthwise_glu(x, weight, bias)
    assert torch.allclose(silu_depthwise_glu(x.cuda(), weight.cuda(), bias.cuda()).cpu(), expected, atol=1e-4)
