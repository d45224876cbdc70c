"""FP8 layers: refused with advice where there are no FP8 units, planned on the meta device, exact on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from solrl_core.families import load_backbone
from solrl_core.kernels.rows import quantize_rows
from solrl_core.precision import fp8
from solrl_core.precision.fp8 import Fp8Linear, Fp8PointwiseConv, Quantized, by_row, has_fp8, product_is_right, project
from solrl_core.precision.fp8_emulated import EmulatedFp8Linear, EmulatedFp8PointwiseConv
from solrl_core.precision.support import supported_precisions
from solrl_core.sampling.generator import Generator
from tests.core.gpu_marks import FP8, check_on_a_gpu
from torch import Tensor, nn

CPU = torch.device("cpu")


def test_a_cpu_has_no_fp8_and_the_error_names_alternatives() -> None:
    assert not has_fp8(CPU)
    assert "fp8" not in supported_precisions(CPU)
    with pytest.raises(ValueError, match=r"this CPU has no FP8 matrix units .* use bf16, or nvfp4"):
        Generator(load_backbone("mini-sana"), "fp8")
    # Sizes that do not divide are refused, too.
    with torch.device("meta"), pytest.raises(ValueError, match=r"multiples of 16: got \(8, 32\)"):
        Fp8Linear.from_linear(nn.Linear(32, 8))


@FP8
def test_a_layer_is_near_the_clean_one_and_follows_a_refresh() -> None:
    check_on_a_gpu(Fp8Linear, Fp8PointwiseConv, 0.005, 0.06)


def test_layers_share_a_quantised_input_only_in_fp8_and_refuse_a_gradient_before_it() -> None:
    with torch.device("meta"):
        clean, quantised = nn.Linear(32, 16), Fp8Linear.from_linear(nn.Linear(32, 16))
        assert by_row([quantised, quantised])
        assert not by_row([quantised, clean])
        with pytest.raises(RuntimeError, match="inference"):
            project([quantised], torch.zeros(2, 32, requires_grad=True))


@pytest.mark.usefixtures("fp8_in_float32")
def test_a_product_without_scales_per_row_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_tensor(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
        return ((codes.float() * scales.max()) @ (weight.float() * weight_scales.max()).T).to(torch.bfloat16)

    def refuses(*_: object) -> Tensor:
        raise RuntimeError("this GPU has no scales per row")

    assert product_is_right(CPU)
    for other in (by_tensor, refuses):
        monkeypatch.setattr(fp8, "product", other)
        assert not product_is_right(CPU)


@torch.no_grad()
@pytest.mark.parametrize("public", sorted({False, fp8._TRACES_PUBLIC_PRODUCT}))
def test_products_are_of_codes_and_scales_and_traced_whole(public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_TRACES_PUBLIC_PRODUCT", public)
    torch.manual_seed(0)
    (codes, scales), (weight, weight_scales) = (quantize_rows(torch.randn(rows, 64), "") for rows in (32, 48))
    traced = torch.compile(fp8.product, backend="aot_eager", fullgraph=True)
    for bias in (None, torch.randn(48, dtype=torch.bfloat16)):
        exact = F.linear(codes.float() * scales, weight.float() * weight_scales, None if bias is None else bias.float())
        for got in (multiply(codes, scales, weight, weight_scales, bias) for multiply in (fp8.product, traced)):
            assert got.dtype == torch.bfloat16
            assert torch.allclose(got.float(), exact, rtol=2**-7, atol=0.05)


@FP8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_input_gives_the_same_output(dtype: torch.dtype) -> None:
    layer = Fp8Linear.from_linear(nn.Linear(256, 128).cuda())
    x = torch.randn(4, 9, 256, device="cuda", dtype=dtype)
    codes, scales = quantize_rows(x, "")
    with torch.no_grad():
        got = layer(Quantized(codes.view(x.shape), scales.view(4, 9, 1), dtype))
        assert got.dtype == dtype
        assert torch.equal(got, layer(x))


@torch.no_grad()
def test_the_emulation_rounds_rows_of_weights_and_activations_alone() -> None:
    torch.manual_seed(0)
    clean = nn.Linear(64, 32)
    x = torch.randn(3, 5, 64) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    layer = EmulatedFp8Linear.from_linear(clean)
    out = layer(x)
    # Rows of every size have the same relative error: that of 3 bits of mantissa.
    without = EmulatedFp8Linear(clean.weight)
    for got, expected in zip(without(x), F.linear(x, clean.weight), strict=True):
        assert 0.01 < (got - expected).norm() / expected.norm() < 0.06
    assert torch.equal(out[1:2], layer(x[1:2]))
    # What E4M3 holds exactly, is multiplied exactly.
    codes, scales = quantize_rows(x.flatten(0, 1), "")
    exact = F.linear(codes.float() * scales, layer.weight, layer.bias).to(torch.bfloat16)
    assert torch.equal(out.flatten(0, 1), exact.float())
    expected = 2 * without(x)
    without.refresh_(clean.weight * 2)
    assert torch.equal(without(x), expected)
    conv = nn.Conv2d(64, 32, 1)
    conv.weight.data, conv.bias.data = clean.weight.data.view(32, 64, 1, 1), clean.bias.data  # type: ignore[union-attr]
    image = x[1].T.reshape(1, 64, 5, 1)
    assert torch.allclose(EmulatedFp8PointwiseConv.from_conv(conv)(image)[0, :, :, 0].T, out[1], atol=1e-2)
