"""Quantised layers: their error, their independence of the batch, their storage."""

import pytest
import torch
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel
from solrl_core.precision.layer_policy import LayerPolicy, apply_policy, linear_flops, share_of_flops
from solrl_core.precision.layers import QuantLinear, QuantPointwiseConv, refresh_weight_
from solrl_core.precision.nvfp4 import quantize_dequantize
from tests.core.gpu_marks import relative
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("inference")


def test_a_linear_has_the_known_error_and_multiplies_quantised_values() -> None:
    linear = nn.Linear(512, 384, bias=False)
    nn.init.normal_(linear.weight)
    x = torch.randn(8, 16, 512)
    assert 0.11 < relative(QuantLinear.from_linear(linear)(x), linear(x)) < 0.16
    linear = nn.Linear(32, 8)
    x = torch.randn(3, 5, 32)
    values = torch.stack([quantize_dequantize(row) for row in x])
    expected = values @ quantize_dequantize(linear.weight).T + linear.bias
    torch.testing.assert_close(QuantLinear.from_linear(linear)(x), expected)
    layer = QuantLinear.from_linear(nn.Linear(32, 8))
    x = torch.randn(2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(x)
    assert torch.equal(inside, layer(x))


def test_the_pointwise_conv_is_the_linear_over_channels() -> None:
    conv = nn.Conv2d(48, 20, 1)
    linear = nn.Linear(48, 20)
    linear.weight.copy_(conv.weight.flatten(1))
    linear.bias.copy_(conv.bias)
    x = torch.randn(3, 48, 5, 7)
    expected = QuantLinear.from_linear(linear)(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    got = QuantPointwiseConv.from_conv(conv)(x)
    assert got.shape == (3, 20, 5, 7)
    torch.testing.assert_close(got, expected)
    assert relative(got, conv(x)) < 0.2


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (QuantLinear.from_linear(nn.Linear(64, 32)), (4, 6, 64)),
        (QuantPointwiseConv.from_conv(nn.Conv2d(64, 32, 1)), (4, 64, 3, 3)),
    ],
    ids=["linear", "conv"],
)
def test_the_batch_does_not_change_a_candidate(layer: QuantLinear | QuantPointwiseConv, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    loud = x.clone()
    loud[1:] *= 1e4
    assert torch.equal(layer(loud)[0], layer(x)[0])
    # The float32 matrix product alone may round differently at another batch size.
    torch.testing.assert_close(layer(x[:1])[0], layer(x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (QuantLinear.from_linear(nn.Linear(32, 8)), (8, 32)),
        (QuantPointwiseConv.from_conv(nn.Conv2d(32, 8, 1)), (8, 32, 1, 1)),
        (QuantPointwiseConv.from_conv(nn.Conv2d(32, 8, 1)), (8, 32)),
    ],
    ids=["linear", "conv", "conv-2d"],
)
def test_a_refresh_requantises_in_place(layer: QuantLinear | QuantPointwiseConv, shape: tuple[int, ...]) -> None:
    storage = layer.weight.data_ptr()
    weight = torch.randn(shape)
    refresh_weight_(layer, weight)
    expected = quantize_dequantize(weight.flatten(1))
    assert torch.equal(layer.weight.flatten(1), expected)
    assert layer.weight.data_ptr() == storage
    # From the clean weight each time: no trace of an earlier refresh stays.
    refresh_weight_(layer, torch.randn(shape))
    refresh_weight_(layer, weight)
    assert torch.equal(layer.weight.flatten(1), expected)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [nn.Linear(24, 8), nn.Conv2d(24, 8, 3)], ids=["linear", "conv"])
def test_a_plain_layer_takes_the_weight_rounded_to_bfloat16(layer: nn.Linear | nn.Conv2d, held: torch.dtype) -> None:
    layer = layer.to(held)
    storage = layer.weight.data_ptr()
    weight = torch.randn(layer.weight.shape)
    refresh_weight_(layer, weight)
    assert torch.equal(layer.weight, weight.bfloat16().to(held))
    assert layer.weight.data_ptr() == storage


def test_misuse_is_refused_by_name() -> None:
    layer = QuantLinear.from_linear(nn.Linear(32, 8))
    for held in (layer, nn.Linear(32, 8)):  # it would broadcast
        with pytest.raises(ValueError, match=r"got shape \(1, 32\), expected \(8, 32\)"):
            refresh_weight_(held, torch.randn(1, 32))
    with pytest.raises(TypeError, match="cannot refresh a LayerNorm"):
        refresh_weight_(nn.LayerNorm(8), torch.ones(8))
    with torch.inference_mode(False), torch.enable_grad(), pytest.raises(RuntimeError, match="no gradient"):
        layer(torch.randn(2, 32, requires_grad=True))
    with pytest.raises(TypeError, match=r"got torch\.bfloat16"):
        layer.to(torch.bfloat16)(torch.randn(2, 32))
    with pytest.raises(ValueError, match="multiple of 16"):
        QuantLinear.from_linear(nn.Linear(24, 8))
    # 16 inputs in a 3×3 depthwise kernel must not pass for 1×16 blocks.
    with pytest.raises(ValueError, match="expected a 1×1 Conv2d"):
        QuantPointwiseConv.from_conv(nn.Conv2d(32, 32, 1, groups=2))


BLOCKS_POLICY = LayerPolicy(quantize=(r"^transformer_blocks\.",))


@pytest.fixture
def sana() -> SanaTransformer2DModel:
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "caption_channels": 32, "sample_size": 8}
    sizes |= {"num_attention_heads": 4, "attention_head_dim": 16, "num_cross_attention_heads": 4}
    return SanaTransformer2DModel(**sizes, cross_attention_head_dim=16, cross_attention_dim=64).eval()


def test_only_pointwise_convs_are_selected() -> None:
    others = [nn.Conv2d(16, 16, 1, **other) for other in ({"stride": 2}, {"padding": 1}, {"groups": 16})]
    model = nn.Sequential(nn.Conv2d(16, 16, 1), *others, nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 1, padding="same"))
    assert LayerPolicy(quantize=(r"\d",)).select(model) == ["0", "5"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (LayerPolicy(("attn9",)), r"'attn9' matches no linear layer of SanaTr.*; it has .*attn1"),
        (LayerPolicy(("attn1",), keep=("logvar",)), "'logvar' matches no linear layer"),
        (LayerPolicy(("conv_depth",)), "'conv_depth' matches no linear layer"),
        (LayerPolicy(("attn1",), keep_max_dim=64), "nothing is left to quantise"),
        (LayerPolicy(("patch_embed",)), "'patch_embed.proj' cannot be quantised: in-features 4, expected"),
    ],
)
def test_an_invalid_policy_is_refused(sana: SanaTransformer2DModel, policy: LayerPolicy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_policy(sana, policy)
    assert not any(isinstance(m, QuantLinear | QuantPointwiseConv) for m in sana.modules())


def test_sana_blocks_are_quantised_but_what_is_kept_and_still_agree(sana: SanaTransformer2DModel) -> None:
    names = LayerPolicy((r"^transformer_blocks\.",), keep=("attn1", r"\.1\.ff"), keep_max_dim=64).select(sana)
    assert names == ["transformer_blocks.0.ff.conv_inverted", "transformer_blocks.0.ff.conv_point"]
    latents, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 32)

    def step() -> Tensor:
        return sana(latents, text, torch.full((2,), 500), return_dict=False)[0]

    clean = step()
    flops = linear_flops(sana, step)
    names = apply_policy(sana, BLOCKS_POLICY)
    ff = sana.transformer_blocks[0].ff
    assert isinstance(ff.conv_inverted, QuantPointwiseConv)
    assert isinstance(ff.conv_point, QuantPointwiseConv)
    assert type(ff.conv_depth) is nn.Conv2d
    assert isinstance(sana.get_submodule("transformer_blocks.1.attn2.to_out.0"), QuantLinear)
    assert len(names) == sum(isinstance(m, QuantLinear | QuantPointwiseConv) for m in sana.modules())
    assert share_of_flops(flops, names, ["transformer_blocks"]) >= 0.9
    assert linear_flops(sana, step) == flops
    assert 0 < relative(step(), clean) < 0.3
    assert not any(module._forward_hooks for module in sana.modules())
    # Hooks are removed when the run fails.
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ZeroDivisionError):
        linear_flops(model, lambda: 1 / 0)
    assert not model[0]._forward_hooks
