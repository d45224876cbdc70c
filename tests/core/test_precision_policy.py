"""The layer policy: selection of layers, invalid policies, and the share of FLOPs it covers."""

from collections.abc import Callable

import pytest
import torch
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel
from gpu_marks import relative
from solrl_core.precision import (
    LayerPolicy,
    QuantLinear,
    QuantPointwiseConv,
    apply_policy,
    linear_flops,
    share_of_flops,
)
from torch import Tensor, nn

BLOCKS_POLICY = LayerPolicy(quantize=(r"^transformer_blocks\.",))


pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def sana() -> SanaTransformer2DModel:
    return SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=16,
        cross_attention_dim=64,
        caption_channels=32,
        sample_size=8,
    ).eval()


def sana_step(model: nn.Module, batch: int = 2) -> Callable[[], Tensor]:
    latents, text = torch.randn(batch, 4, 8, 8), torch.randn(batch, 5, 32)
    return lambda: model(latents, text, torch.full((batch,), 500), return_dict=False)[0]


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(16, 16, 1, stride=2),
        nn.Conv2d(16, 16, 1, padding=1),
        nn.Conv2d(16, 16, 1, groups=16),
        nn.Conv2d(16, 16, 3),
    ],
    ids=["stride", "padding", "groups", "kernel"],
)
def test_only_pointwise_convs_are_selected(other: nn.Conv2d) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 1), other, nn.Conv2d(16, 16, 1, padding="same"))
    assert LayerPolicy(quantize=(r"\d",)).select(model) == ["0", "2"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            LayerPolicy(("attn9",)),
            r"'attn9' matches no linear layer of SanaTransformer2DModel; it has .*attn1",
        ),
        (LayerPolicy(("attn1",), keep=("logvar",)), "'logvar' matches no linear layer"),
        (LayerPolicy(("conv_depth",)), "'conv_depth' matches no linear layer"),
        (LayerPolicy(("attn1",), keep_max_dim=64), "nothing is left to quantise"),
        (LayerPolicy(("patch_embed",)), "'patch_embed.proj' cannot be quantised: in-features 4, expected"),
    ],
    ids=["quantize", "keep", "depthwise", "all-kept", "in-features"],
)
def test_an_invalid_policy_is_refused(sana: SanaTransformer2DModel, policy: LayerPolicy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_policy(sana, policy)
    assert not any(isinstance(m, QuantLinear | QuantPointwiseConv) for m in sana.modules())


def test_keep_wins_and_small_layers_are_kept(sana: SanaTransformer2DModel) -> None:
    names = LayerPolicy((r"^transformer_blocks\.",), keep=("attn1", r"\.1\.ff"), keep_max_dim=64).select(sana)
    assert names == ["transformer_blocks.0.ff.conv_inverted", "transformer_blocks.0.ff.conv_point"]


def test_sana_blocks_are_quantised_and_still_agree(sana: SanaTransformer2DModel) -> None:
    step = sana_step(sana)
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


def test_hooks_are_removed_when_the_run_fails() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ZeroDivisionError):
        linear_flops(model, lambda: 1 / 0)
    assert not model[0]._forward_hooks
