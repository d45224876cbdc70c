"""NVFP4 against a scalar oracle that rounds by enumerating the representable values."""

import os
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from solrl_core.precision.nvfp4 import quantize_dequantize, quantize_dequantize_per_candidate
from torch import Tensor

F32 = np.float32
E2M1 = [F32(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
E4M3 = [F32(m * 2.0**-9) for m in range(8)] + [
    F32((1 + m / 8) * 2.0 ** (e - 7)) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def nearest(value: np.float32, grid: list[np.float32]) -> np.float32:
    """Nearest grid value to a magnitude, saturating; a tie goes to the even code (its index)."""
    if value >= grid[-1]:
        return grid[-1]
    low = max(i for i, entry in enumerate(grid) if entry <= value)
    exact, below, above = (Fraction(float(v)) for v in (value, grid[low], grid[low + 1]))
    if exact - below == above - exact:
        return grid[low + low % 2]
    return grid[low] if exact - below < above - exact else grid[low + 1]


def oracle(x: np.ndarray, amax: np.float32 | None = None) -> np.ndarray:
    """Reference values of a finite 2-D float32 array under one tensor scale, one scalar at a time."""
    largest = F32(np.abs(x).max()) if amax is None else F32(amax)
    out = np.zeros_like(x)
    if largest == 0:
        return out
    encode = F32(2688) / largest
    decode = F32(1) / encode
    for row, start in np.ndindex(x.shape[0], x.shape[1] // 16):
        block = x[row, 16 * start : 16 * start + 16]
        scale = nearest(F32(np.abs(block).max()) * (encode * (F32(1) / F32(6))), E4M3)
        if scale == 0:
            continue
        inverse = F32(1) / (scale * decode)
        for column, element in enumerate(block):
            code = nearest(abs(element * inverse), E2M1)
            out[row, 16 * start + column] = (code if element >= 0 else -code) * scale * decode
    return out


def assert_same_bits(got: Tensor, expected: np.ndarray) -> None:
    # Adding +0 makes every zero positive in the oracle, as it is documented to be.
    np.testing.assert_array_equal(got.numpy().view(np.int32), (expected + F32(0)).view(np.int32))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def outliers() -> np.ndarray:
    x = random(8, 64, seed=1)
    x[::3, ::17] *= F32(1e4)
    return x


def tiny_blocks() -> np.ndarray:
    """Blocks whose E4M3 scale falls from normal through subnormal to zero, down to 1e-6 of the amax."""
    x = random(48, 16, seed=2)
    return np.asarray(x / np.abs(x).max(1, keepdims=True) * np.geomspace(1, 1e-6, 48)[:, None], F32)


def exact_ties() -> np.ndarray:
    """With amax 2688 the tensor scale is 1; a block amax of 6 gives a block scale of 1."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    beside = [np.nextafter(F32(t), F32(side)) for t in ties for side in (0, 6)]
    values = np.array([*ties, *beside, *E2M1], F32)
    x = np.zeros((1 + 2 * len(values), 16), F32)
    x[0, 0] = 2688
    x[1:, 0] = 6
    x[1:, 1] = np.concatenate([values, -values])
    return x


def scale_ties() -> np.ndarray:
    """Block amaxes halfway between neighbouring E4M3 values, subnormal ones too."""
    x = np.zeros((len(E4M3), 16), F32)
    x[0, 0] = 2688
    x[1:, 0] = [6 * (low + high) / 2 for low, high in pairwise(E4M3)]
    x[1:, 1] = x[1:, 0] / 3
    return x


CASES = {
    **{"random": random(16, 96), "large": random(4, 32) * F32(1e30), "small": random(4, 32) * F32(1e-30)},
    **{"outliers": outliers(), "tiny_blocks": tiny_blocks(), "zeros": np.zeros((3, 32), F32)},
    "some_zero_blocks": random(4, 48) * np.repeat([1, 0, 1], 16).astype(F32),
    **{"exact_ties": exact_ties(), "scale_ties": scale_ties()},
}


@pytest.mark.parametrize("x", CASES.values(), ids=CASES.keys())
def test_equals_the_oracle_bit_for_bit(x: np.ndarray) -> None:
    assert_same_bits(quantize_dequantize(torch.from_numpy(x)), oracle(x))


@given(
    rows=st.integers(1, 4),
    blocks=st.integers(1, 5),
    exponent=st.floats(-25, 25),
    spread=st.floats(0, 3),
    seed=st.integers(0, 2**32 - 1),
    headroom=st.none() | st.floats(0.1, 100),
)
@settings(max_examples=200, deadline=None)
def test_equals_the_oracle_at_any_shape_and_scale(
    rows: int, blocks: int, exponent: float, spread: float, seed: int, headroom: float | None
) -> None:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, 16 * blocks)) * np.exp(spread * generator.standard_normal((rows, 1)))
    x = (x * 10.0**exponent).astype(F32)
    amax = None if headroom is None else F32(np.abs(x).max() * F32(headroom))
    got = quantize_dequantize(torch.from_numpy(x), amax=None if amax is None else torch.tensor(amax))
    assert_same_bits(got, oracle(x, amax))


def test_a_scale_per_candidate_makes_rows_independent() -> None:
    x = torch.from_numpy(random(5, 4, 64)) * torch.tensor([1.0, 1e4, 1e-4, 3.0, 0.0])[:, None, None]
    amax = x.abs().amax((1, 2), keepdim=True)
    together = quantize_dequantize(x, amax=amax)
    alone = torch.cat([quantize_dequantize(row) for row in torch.tensor_split(x, 5)])
    assert torch.equal(together, alone)
    assert torch.equal(quantize_dequantize_per_candidate(x), alone)
    assert not torch.equal(quantize_dequantize(x), alone)


def test_neither_layout_nor_bfloat16_matters_and_the_input_is_left_alone() -> None:
    x = torch.from_numpy(random(2, 32, 3, 5)).movedim(1, -1)
    before = x.clone()
    contiguous = quantize_dequantize(x.contiguous())
    assert torch.equal(quantize_dequantize(x), contiguous)
    assert torch.equal(quantize_dequantize(x.expand(2, 2, 3, 5, 32)), contiguous.expand(2, 2, 3, 5, 32))
    assert torch.equal(x, before)
    x = torch.from_numpy(random(4, 32)).bfloat16()
    got = quantize_dequantize(x)
    assert got.dtype == torch.float32
    assert torch.equal(got, quantize_dequantize(x.float()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_value_makes_everything_under_its_scale_nan(bad: float) -> None:
    x = torch.from_numpy(random(3, 2, 32))
    x[1, 0, 5] = bad
    assert quantize_dequantize(x).isnan().all()
    got = quantize_dequantize_per_candidate(x)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_given_amaxes_and_the_smallest_magnitudes() -> None:
    x = torch.from_numpy(random(2, 32))
    x[0, 3], x[1, 20] = float("nan"), float("-inf")
    got = quantize_dequantize(x, amax=torch.tensor(2688.0))
    assert got[0, :16].isnan().all()
    assert got.isnan().sum() == 16
    assert got[1, 20] == -2688
    assert torch.equal(quantize_dequantize(x[:, :16], amax=torch.tensor(0.0))[1], torch.zeros(16))
    assert quantize_dequantize(x, amax=torch.tensor(0.0))[0, :16].isnan().all()
    # The smallest magnitudes stay close, or become zero.
    x = torch.from_numpy(random(4, 32))
    for magnitude in (1e-36, 1e-38):
        got = quantize_dequantize(x * magnitude) / magnitude
        torch.testing.assert_close(got, x, rtol=0.26, atol=0.26)
    assert torch.equal(quantize_dequantize(x * 1e-41), torch.zeros(4, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_torch_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(shape, generator=generator)
        for shape in [(3, 16, 192), (2, 5, 48), (3, 70, 192), (64,), (65_536, 16)]
    ]
    made += [torch.from_numpy(x) for x in CASES.values()]
    made += [made[0] * magnitude for magnitude in (1e-36, 1e-38, 1e-41)]
    for bad in (float("nan"), float("inf"), float("-inf")):
        for good in (made[0], made[2]):
            made.append(good.clone())
            made[-1][1, 2, 5] = bad
    for x in made:
        for rounded in (quantize_dequantize, quantize_dequantize_per_candidate):
            got, expected = rounded(x.to("cuda", dtype)).cpu(), rounded(x.to(dtype))
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got.signbit()[~got.isnan()], expected.signbit()[~expected.isnan()])


def test_shapes_without_blocks_integers_and_a_wrong_amax_are_refused() -> None:
    for shape in ((4, 20), (15,), (0, 16), ()):
        with pytest.raises(ValueError, match=r"multiple of 16.*got shape"):
            quantize_dequantize(torch.zeros(shape))
    with pytest.raises(ValueError, match="int64"):
        quantize_dequantize(torch.zeros(2, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"last axis of 1: got shape \(2, 16\)"):
        quantize_dequantize(torch.zeros(2, 16), amax=torch.ones(2, 16))


_TORCHAO = """
import sys, torch
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
inputs = torch.load(sys.argv[1])
torch.save(
    [NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())).dequantize(torch.float32)
     for x in inputs],
    sys.argv[1],
)
"""


@pytest.mark.release
def test_equals_torchao_on_data_of_normal_range(tmp_path: Path) -> None:
    beside = Path(sys.prefix) / "cross-checks"
    assert (beside / "torchao").is_dir(), "torchao is installed there by `make test`"
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(128, 512, generator=generator) * scale for scale in (1e-3, 1.0, 300.0)]
    file = tmp_path / "values.pt"
    torch.save(inputs, file)
    environment = os.environ | {"PYTHONPATH": str(beside)}
    subprocess.run([sys.executable, "-c", _TORCHAO, str(file)], env=environment, check=True, capture_output=True)
    for x, theirs in zip(inputs, torch.load(file), strict=True):
        ours = quantize_dequantize(x)
        # Its order of operations is another, so a value next to a tie may be rounded the other way.
        assert torch.isclose(ours, theirs, rtol=1e-5, atol=0).float().mean() > 0.999
        assert (ours - theirs).abs().max() <= 0.5 * x.abs().max()
