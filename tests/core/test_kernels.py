"""Fused operations against what diffusers computes; on a GPU, the kernels against torch's own operations."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from lora_helpers import random_adapter
from solrl_core.batches import batches, sizes
from solrl_core.families import load_backbone
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.generator import Generator
from solrl_core.kernels import E4M3_MAX, quantize_rows, rms_norm_rope, silu_depthwise_glu
from solrl_core.precision import apply_policy, fp8
from torch import Tensor

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
FP8 = pytest.mark.skipif(
    not torch.cuda.is_available() or fp8.fp8_scaling(torch.device("cuda")) is None, reason="needs a GPU with FP8 units"
)


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
    expected = F.gelu(x, approximate="tanh")
    assert ((codes.float() * scales - expected).abs() <= expected.abs() / 16 + scales * 2**-10).all()


def test_an_activation_of_small_inputs_does_not_overflow() -> None:
    x = torch.linspace(-6, 0, 64)[None]
    codes, scales = quantize_rows(x, "gelu_tanh")
    expected = F.gelu(x, approximate="tanh")
    assert expected.abs().max() > 0.17
    assert codes.float().isfinite().all()
    assert (codes.float() * scales - expected).abs().max() <= 0.17 / 16


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


@pytest.mark.parametrize("name", ["mini-sana", "mini-sd3", "mini-flux"])
def test_a_fused_transformer_computes_what_diffusers_does(name: str) -> None:
    backbone = load_backbone(name)
    assert isinstance(backbone, PipelineBackbone)
    latents = torch.randn(3, *backbone.latent_shape)
    conditioning = backbone.encode(["a red circle", "a blue square above a green ring", ""])
    sigma = torch.tensor([0.9, 0.5, 0.1])
    expected = backbone.velocity(backbone.transformer, latents, sigma, conditioning)
    fused = copy.deepcopy(backbone.transformer)
    backbone.fuse(fused)
    got = backbone.velocity(fused, latents, sigma, conditioning)
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    swapped = {type(module) for module in fused.modules()} | {type(p) for p in fused.attn_processors.values()}
    assert any(kind.__module__.startswith("solrl_core.families") for kind in swapped)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("name", ["mini-sana", "mini-sd3", "mini-flux"])
def test_layers_that_share_an_input_are_given_the_same_codes(
    name: str, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 arithmetic itself needs a GPU; here its product is that of the codes, and what is counted are the rows."""
    quantised: list[torch.Size] = []

    def rows(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
        quantised.append(x.shape)
        return quantize_rows(x, activation)

    def product(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(codes.float() * scale, weight.float() * weight_scale, None if bias is None else bias.float())

    monkeypatch.setattr(fp8, "require_fp8", lambda device: scaling)
    monkeypatch.setattr(fp8, "_product", product)
    backbone = load_backbone(name)
    assert isinstance(backbone, PipelineBackbone)
    latents, conditioning = torch.randn(2, *backbone.latent_shape), backbone.encode(["a red circle"] * 2)
    sigma = torch.full((2,), 0.5)
    plain = copy.deepcopy(backbone.transformer)
    apply_policy(plain, backbone.fp8_policy, "fp8")
    monkeypatch.setattr(fp8, "quantize_rows", rows)
    expected = backbone.velocity(plain, latents, sigma, conditioning)
    unfused = len(quantised)
    backbone.fuse(plain)
    quantised.clear()
    got = backbone.velocity(plain, latents, sigma, conditioning)
    assert len(quantised) < unfused or scaling == "tensor"
    # Parts that were concatenated have scales of their own now, and float32 sums are in another order.
    exact = backbone.velocity(backbone.transformer, latents, sigma, conditioning)
    assert torch.linalg.norm(got - exact) < 1.2 * torch.linalg.norm(expected - exact)


@pytest.mark.parametrize("limit", [24, 12, 6, 3, 2, 1])
@pytest.mark.parametrize("count", [1, 5, 6, 7, 18, 19, 24, 25, 30, 48, 97])
def test_a_gpu_s_batches_hold_each_row_once_and_are_of_two_sizes(count: int, limit: int) -> None:
    made = batches(count, limit, torch.device("cuda"))
    assert [place for batch in made for place in batch.places[: batch.count]] == list(range(count))
    assert {len(batch.places) for batch in made} <= set(sizes(limit))
    assert sum(len(batch.places) for batch in made) - count < sizes(limit)[1]


@GPU
@pytest.mark.parametrize("name", ["mini-sana", "mini-sd3", "mini-flux"])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=FP8)])
def test_compiled_blocks_compute_what_eager_ones_do_and_an_adapter_compiles_nothing(name: str, precision: str) -> None:
    backbone = load_backbone(name, device="cuda")
    generator = Generator(backbone, precision)
    latents = torch.randn(6, *backbone.latent_shape, device="cuda")
    conditioning, sigma = backbone.encode(["a red circle"] * 6), torch.full((6,), 0.7, device="cuda")
    exact = backbone.velocity(backbone.transformer, latents, sigma, conditioning)
    got = backbone.velocity(generator.transformer, latents, sigma, conditioning)
    assert torch.linalg.norm(got - exact) < (0.02 if precision == "bf16" else 0.06) * torch.linalg.norm(exact)
    generator.set_adapter(random_adapter(backbone, 0))
    with torch.compiler.set_stance("fail_on_recompile"):
        adapted = backbone.velocity(generator.transformer, latents, sigma, conditioning)
    assert torch.linalg.norm(adapted - got) > 0.01 * torch.linalg.norm(got)


@GPU
@pytest.mark.parametrize("activation", ["", "gelu_tanh"])
@pytest.mark.parametrize("length", [16, 320, 3072, 12288])
def test_the_rows_kernel(activation: str, length: int) -> None:
    x = torch.randn(2, 37, length, dtype=torch.bfloat16)
    there = x.cuda()
    views: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t[:, 5:20],
        lambda t: t.view(2, 37, -1, 16).transpose(1, 2),
    ]
    for view in views:
        expected, expected_scales = quantize_rows(view(x), activation)
        codes, scales = quantize_rows(view(there), activation)
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
