"""Fused operations compared with diffusers; on a GPU, the kernels compared with torch operations."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, SanaLinearAttnProcessor2_0
from solrl_core.families import load_backbone
from solrl_core.kernels.attention import attend
from solrl_core.kernels.bounded_attention import bounded_attention, plain_bounded_attention
from solrl_core.kernels.depthwise import silu_depthwise_glu
from solrl_core.kernels.fp8_attention import fp8_attention, plain_fp8_attention
from solrl_core.kernels.linear_attention import linear_attention, plain_linear_attention
from solrl_core.kernels.modulate import add_norm_modulate_quantize, norm_modulate_quantize
from solrl_core.kernels.rows import quantize_rows
from solrl_core.sampling.generator import Generator
from tests.core.gpu_marks import FP8, GPU, HOPPER, relative
from tests.core.lora_helpers import random_adapter
from torch import Tensor

pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize("attend_linearly", [linear_attention, plain_linear_attention])
def test_linear_attention_equals_sanas(attend_linearly: Callable[..., Tensor]) -> None:
    attn = Attention(48, heads=3, dim_head=16, processor=SanaLinearAttnProcessor2_0())
    x = torch.randn(2, 25, 48)
    attended = attend_linearly(attn.to_q(x), attn.to_k(x), attn.to_v(x), 3)
    torch.testing.assert_close(attn.to_out[0](attended), attn(x))


def half_a_block(dtype: torch.dtype, tokens: int, length: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """Inputs of a block's second half: x and out [2, tokens, length]; gate, scale and shift as slices of one tensor.

    Includes a row with an outlier, a row of zeros and a row with a variance near the norm's epsilon; half of the second
    candidate's channels are scaled to zero.
    """
    torch.manual_seed(0)
    x, out, modulation = (
        torch.randn(2, tokens, length) * 3 + 1,
        torch.randn(2, tokens, length),
        torch.randn(2, 6 * length),
    )
    x[0, 1, length // 2] = 300
    x[0, 2], out[0, 2] = 0, 0
    x[0, 3], out[0, 3] = x[1, 3] / 3000, out[1, 3] / 3000
    modulation[1, 4 * length : 9 * length // 2] = -1
    x, out, modulation = (t.to(device, dtype) for t in (x, out, modulation))
    shift, scale, gate = modulation.chunk(6, 1)[3:]
    return x, out, gate, scale, shift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_modulation_equal_torchs_before_quantisation(dtype: torch.dtype) -> None:
    x, out, gate, scale, shift = half_a_block(dtype, 5, 48)
    codes, scales = norm_modulate_quantize(x, scale, shift, 1e-6)
    modulated = F.layer_norm(x.float(), (48,), eps=1e-6) * (1 + scale.float()[:, None]) + shift.float()[:, None]
    expected, expected_scales = quantize_rows(modulated, "")
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(codes.float(), expected.float().view(x.shape))
    assert torch.equal(scales, expected_scales.view(2, 5, 1))
    # A gated residual is added before the norm.
    total, codes, scales = add_norm_modulate_quantize(x, out, gate, scale, shift, 1e-6)
    expected, expected_scales = norm_modulate_quantize(total, scale, shift, 1e-6)
    assert total.dtype == dtype
    assert torch.equal(total, (x.float() + gate.float()[:, None] * out.float()).to(dtype))
    assert torch.equal(codes.float(), expected.float())
    assert torch.equal(scales, expected_scales)


@GPU
@pytest.mark.parametrize("name", ["mini-sana", "mini-sd3", "mini-flux"])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=FP8)])
def test_compiled_blocks_equal_eager_ones_and_an_adapter_does_not_recompile(name: str, precision: str) -> None:
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
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [16, 320, 2432, 3072, 5000])
def test_the_norm_and_modulation_kernel(length: int, dtype: torch.dtype, gated: bool) -> None:
    views: list[Callable[[Tensor], Tensor]] = [lambda t: t, lambda t: t[:, 1:9], lambda t: t.mT.contiguous().mT]
    for view in views:
        (x, out, *rest), (there, out_there, *rest_there) = (
            half_a_block(dtype, 37, length, device) for device in ("cpu", "cuda")
        )
        if gated:
            total, expected, expected_scales = add_norm_modulate_quantize(view(x), view(out), *rest, 1e-6)
            total_there, codes, scales = add_norm_modulate_quantize(view(there), view(out_there), *rest_there, 1e-6)
            assert torch.allclose(total_there.cpu(), total, rtol=1e-5, atol=1e-5)
        else:
            expected, expected_scales = norm_modulate_quantize(view(x), *rest[1:], 1e-6)
            codes, scales = norm_modulate_quantize(view(there), *rest_there[1:], 1e-6)
        assert torch.allclose(scales.cpu(), expected_scales, rtol=1e-5)
        assert (codes.cpu().float() != expected.float()).float().mean() < 0.002


@GPU
def test_the_norm_and_modulation_kernel_maps_zeros_to_zeros() -> None:
    nothing = torch.zeros(2, 3, 320, device="cuda", dtype=torch.bfloat16)
    total, codes, scales = add_norm_modulate_quantize(nothing, nothing, *(nothing[:, 0],) * 3, 1e-6)
    assert total.eq(0).all()
    assert codes.float().eq(0).all()
    assert scales.isfinite().all()


@GPU
@pytest.mark.parametrize("shape", [(2, 5, 7, 48), (3, 8, 8, 320), (1, 1, 1, 16), (1, 32, 32, 1120)])
def test_the_depthwise_kernel(shape: tuple[int, ...]) -> None:
    given = [torch.randn(size) for size in (shape, (shape[-1], 1, 3, 3), shape[-1:])]
    expected = silu_depthwise_glu(*given)
    assert torch.allclose(silu_depthwise_glu(*(x.cuda() for x in given)).cpu(), expected, atol=1e-4)
    # In BF16 it is right up to a hardware's tanh.
    half = [x.bfloat16() for x in given]
    expected = silu_depthwise_glu(*(x.float() for x in half))
    assert relative(silu_depthwise_glu(*(x.cuda() for x in half)), expected) < 0.0025


@GPU
@pytest.mark.parametrize(
    ("size", "heads", "tokens"), [(32, 3, 100), (32, 70, 1024), (16, 5, 37), (8, 6, 64), (32, 1, 1)]
)
def test_the_linear_attention_kernel(size: int, heads: int, tokens: int) -> None:
    whole = torch.randn(2, tokens, 3 * size * heads).bfloat16()
    expected = linear_attention(*whole.float().chunk(3, 2), heads)
    views: list[Callable[[Tensor], Tensor]] = [lambda t: t, lambda t: t.contiguous(), lambda t: t.mT.contiguous().mT]
    for view in views:
        assert relative(linear_attention(*map(view, whole.cuda().chunk(3, 2)), heads), expected) < 0.0025


@GPU
@pytest.mark.parametrize(("size", "dtype"), [(48, torch.bfloat16), (32, torch.float32), (32, torch.float16)])
def test_linear_attention_without_a_kernel_is_torchs(size: int, dtype: torch.dtype) -> None:
    given = [x.to("cuda", dtype) for x in torch.randn(3, 2, 50, 3 * size)]
    assert torch.equal(linear_attention(*given, 3), plain_linear_attention(*given, 3))


@HOPPER
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "size"), [(130, 203, 3, 64), (64, 64, 4, 32), (1, 1, 1, 16), (1229, 1229, 24, 64)]
)
def test_the_attention_kernel_without_a_maximum(queries: int, keys: int, heads: int, size: int) -> None:
    query = torch.randn(2, queries, heads, size).bfloat16()
    both = torch.randn(2, keys, 2 * heads, size).bfloat16()
    key, value = both.chunk(2, 2)
    # One row of logits as large as they may be, one as small.
    query[0, 0], key[0, 0] = 5, 69 / 5 / size**0.5
    query[1, 0], key[1, 0] = 5, -69 / 5 / size**0.5
    expected = plain_bounded_attention(query.float(), key.float(), value.float())
    got = bounded_attention(query.cuda(), *both.cuda().chunk(2, 2))
    assert relative(got, expected) < 0.004
    assert relative(got[:, :1], expected[:, :1]) < 0.01


@HOPPER
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "size"), [(130, 203, 3, 64), (64, 128, 4, 128), (1, 1, 1, 64), (3510, 3510, 12, 128)]
)
def test_the_attention_kernel_in_fp8(queries: int, keys: int, heads: int, size: int) -> None:
    query = torch.randn(2, queries, heads, size).bfloat16()
    both = torch.randn(2, keys, 2 * heads, size).bfloat16()
    query[0, 0], both[1, :, 0] = 100, 0
    exact = F.scaled_dot_product_attention(*(x.float().transpose(1, 2) for x in (query, *both.chunk(2, 2))))
    plain = plain_fp8_attention(query.float(), *both.float().chunk(2, 2))
    got = fp8_attention(query.cuda(), *both.cuda().chunk(2, 2))
    # A weight's code depends on the largest logit so far, not on the largest of all, and FP8 units round their sums.
    assert relative(got, plain) < 0.03
    assert relative(got, exact.transpose(1, 2)) < 1.15 * relative(plain, exact.transpose(1, 2))


@HOPPER
def test_attention_of_bounded_logits_is_that_kernels() -> None:
    heads = torch.randn(3, 2, 70, 3, 64, device="cuda").bfloat16()
    assert torch.equal(attend(*heads, bounded=True), bounded_attention(*heads))
    mask = torch.zeros(2, 1, 1, 70, device="cuda").bfloat16()
    for unbounded in (attend(*heads), attend(*heads, mask, bounded=True)):
        assert relative(unbounded, attend(*heads, bounded=True).cpu().float()) < 0.01
        assert not torch.equal(unbounded, attend(*heads, bounded=True))


def fused_operations() -> dict[str, tuple[Callable[..., object], list[Tensor]]]:
    """Operations after one of torch, and their inputs on a GPU in BF16."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    x, out, gate, scale, shift = half_a_block(torch.bfloat16, 37, 320, "cuda")
    return {
        "linear": (lambda q, k, v: linear_attention(-q, k.abs(), -v, 3), [random(2, 100, 96) for _ in range(3)]),
        "linear of one tensor": (lambda x: linear_attention(*(-x).chunk(3, 2), 3), [random(2, 100, 288)]),
        "depthwise": (
            lambda x, weight, bias: silu_depthwise_glu(-x, weight, bias),
            [random(2, 5, 7, 48), random(48, 1, 3, 3), random(48)],
        ),
        "norm": (lambda x, *rest: norm_modulate_quantize(-x, *rest, 1e-6), [x, scale, shift]),
        "add and norm": (lambda x, *rest: add_norm_modulate_quantize(-x, *rest, 1e-6), [x, out, gate, scale, shift]),
        "attention": (
            lambda image, text: attend(*torch.cat([-image, -text], 2), bounded=True),
            [random(3, 2, 70, 3, 64), random(3, 2, 7, 3, 64)],
        ),
        "attention in FP8": (lambda heads: fp8_attention(*-heads), [random(3, 2, 150, 3, 64)]),
    }


@HOPPER
def test_a_compiled_kernel_gives_the_same() -> None:
    for name, (operation, given) in fused_operations().items():
        expected = operation(*given)
        got = torch.compile(operation, fullgraph=True, dynamic=False)(*given)
        for mine, theirs in zip(*([x] if isinstance(x, Tensor) else x for x in (got, expected)), strict=True):
            assert relative(mine, theirs.cpu().float()) < 1e-3, name


@HOPPER
def test_sd3s_blocks_on_a_gpu_attend_without_a_maximum() -> None:
    backbone = load_backbone("mini-sd3", device="cuda")
    blocks = Generator(backbone, "bf16").transformer.get_submodule("transformer_blocks")
    assert all(block.bounded for block in blocks.children())
