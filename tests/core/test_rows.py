"""FP8 rows: accuracy of the codes; on a GPU, the kernels compared with torch's operations."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from solrl_core.kernels.rope import rms_norm_rope
from solrl_core.kernels.rows import E4M3_MAX, quantize_rows
from tests.core.gpu_marks import FP8, GPU, relative
from torch import Tensor

pytestmark = pytest.mark.usefixtures("inference")


def test_rows_come_back_within_half_a_code() -> None:
    x = torch.randn(3, 5, 64) * torch.logspace(-6, 6, 15).view(3, 5, 1)
    codes, scales = quantize_rows(x, "")
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.float().abs().amax(1).eq(E4M3_MAX).all()
    back = (codes.float() * scales).view_as(x)
    # Three bits of mantissa, and below the least normal number steps of 2**-9.
    assert ((back - x).abs() <= x.abs() / 16 + scales.view(3, 5, 1) * 2**-10).all()
    # An activation.
    x = torch.randn(7, 32)
    codes, scales = quantize_rows(x, "gelu_tanh")
    expected = F.gelu(x, approximate="tanh")
    assert ((codes.float() * scales - expected).abs() <= expected.abs() / 16 + scales * 2**-10).all()


def test_small_inputs_of_an_activation_do_not_overflow_and_a_row_of_zeros_is_zeros() -> None:
    x = torch.linspace(-6, 0, 64)[None]
    codes, scales = quantize_rows(x, "gelu_tanh")
    expected = F.gelu(x, approximate="tanh")
    assert expected.abs().max() > 0.17
    assert codes.float().isfinite().all()
    assert (codes.float() * scales - expected).abs().max() <= 0.17 / 16
    codes, scales = quantize_rows(torch.zeros(2, 16), "")
    assert codes.float().eq(0).all()
    assert scales.isfinite().all()


@FP8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["", "gelu_tanh"])
@pytest.mark.parametrize("length", [16, 320, 2240, 2435, 3072, 9728, 12288, 16400])
def test_the_rows_kernel(length: int, activation: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 37, length + 2).to(dtype)
    there = x.cuda()
    views: list[Callable[[Tensor], Tensor]] = [
        lambda t: t[..., :length].contiguous(),
        lambda t: t[..., :length].contiguous()[:, 5:20],
        lambda t: t[..., :length],
        lambda t: t[..., 1 : length + 1],
    ]
    if length % 16 == 0:
        views.append(lambda t: t[..., :length].contiguous().view(2, 37, -1, 16).transpose(1, 2))
    for view in views:
        expected, expected_scales = quantize_rows(view(x), activation)
        codes, scales = quantize_rows(view(there), activation)
        assert torch.allclose(scales.cpu(), expected_scales, rtol=1e-5)
        # The hardware's tanh moves some of the smallest codes.
        assert relative(codes.float() * scales, expected.float() * expected_scales) < 0.01
        if not activation or dtype != torch.bfloat16:
            assert (codes.cpu().float() != expected.float()).float().mean() < 0.002


@FP8
@pytest.mark.parametrize("activation", ["", "gelu_tanh"])
def test_compiled_rows_are_the_same(activation: str) -> None:
    def operation(x: Tensor, y: Tensor) -> list[Tensor]:
        # Of a tensor the compiler computes, and of slices of a product.
        wide = x @ y
        parts = (-x, wide[:, 5:], wide[..., 64:320], wide[:, 3:, 64:320])
        return [result for part in parts for result in quantize_rows(part, activation)]

    given = [torch.randn(shape, device="cuda").bfloat16() for shape in ((2, 37, 320), (320, 384))]
    compiled = torch.compile(operation, fullgraph=True, dynamic=False)(*given)
    for mine, theirs in zip(compiled, operation(*given), strict=True):
        assert torch.equal(mine.float(), theirs.float())


def two_parts(heads: int, size: int, text: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Image tokens and their norm's weights, cosines and sines; text tokens and the weights of theirs."""
    x, other = torch.randn(2, 5, heads, size).to(dtype), torch.randn(2, text, heads, size).to(dtype)
    weight, text_weight = torch.rand(2, size).to(dtype)
    angle = torch.rand(9 + text, size // 2) * 6
    return [x, weight, angle.cos(), angle.sin()], [other, text_weight]


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", [0, 1, 4, 16])
@pytest.mark.parametrize(("heads", "size"), [(2, 16), (8, 128), (24, 128), (32, 128), (50, 32)])
def test_the_norm_and_positions_kernel(heads: int, size: int, text: int, dtype: torch.dtype) -> None:
    own, other = two_parts(heads, size, text, dtype)
    given = [*own, 1e-6, *(other if text else ())]
    views: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t.mT.contiguous().mT if t.ndim == 4 else t,
        lambda t: F.pad(t, (1, 0))[..., 1:] if t.ndim == 4 else F.pad(t, (1, 0))[1:],
    ]
    expected = rms_norm_rope(*(x.float() if isinstance(x, Tensor) else x for x in given))
    for view in views:
        there = [view(x.cuda()) if isinstance(x, Tensor) and x.dtype == dtype and x.ndim != 2 else x for x in given]
        got = rms_norm_rope(*(x.cuda() if isinstance(x, Tensor) else x for x in there))
        assert got.dtype == dtype
        assert relative(got, expected) < {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 0.003}[dtype]


@GPU
@pytest.mark.parametrize("text", [0, 4])
def test_compiled_norm_and_positions_are_the_same(text: int) -> None:
    own, other = two_parts(24, 128, text, torch.bfloat16)
    given = [x.cuda() for x in (*own, *other)]

    def operation(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, text: Tensor, text_weight: Tensor) -> Tensor:
        if not text.shape[1]:
            return rms_norm_rope(-x, weight, cos, sin, 1e-6)
        return rms_norm_rope(-x, weight, cos, sin, 1e-6, -text, text_weight)

    compiled = torch.compile(operation, fullgraph=True, dynamic=False)(*given)
    assert torch.equal(compiled, operation(*given))
