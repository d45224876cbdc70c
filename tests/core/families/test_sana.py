"""SANA at its true size, on the meta device: quantised layers compared with the paper's list."""

import re

import pytest
import torch
from diffusers import SanaTransformer2DModel
from solrl_core.families import Backbone
from solrl_core.families.sana import Sana
from solrl_core.lora import adapter_layout
from solrl_core.precision import LayerPolicy, linear_flops

KEPT = ("t_embedder", "t_block", "cfg_embedder", "y_embedder", "x_embedder", "final_layer", "logvar_linear", "attn.qkv")
KEPT_SIZE = 2240
TARGETS = {"attn.qkv", "attn.proj", "cross_attn.q_linear", "cross_attn.kv_linear", "cross_attn.proj"}
NATIVE = {
    "attn1.to_q": "attn.qkv",
    "attn1.to_k": "attn.qkv",
    "attn1.to_v": "attn.qkv",
    "attn1.to_out.0": "attn.proj",
    "attn2.to_q": "cross_attn.q_linear",
    "attn2.to_k": "cross_attn.kv_linear",
    "attn2.to_v": "cross_attn.kv_linear",
    "attn2.to_out.0": "cross_attn.proj",
    "ff.conv_inverted": "mlp.inverted_conv",
    "ff.conv_point": "mlp.point_conv",
}
"""Layer of a block, and the authors' name for it or for the larger one that it is a part of."""
SIZES = {"attn.qkv": 3 * 2240, "attn.proj": 2240, "cross_attn.q_linear": 2240, "cross_attn.kv_linear": 2 * 2240}
SIZES |= {"cross_attn.proj": 2240, "mlp.inverted_conv": 2 * 5600, "mlp.point_conv": 5600}
"""The larger dimension of each, as the authors have it: 20 blocks of width 2240, feed-forward of 2.5 times that."""


@pytest.fixture(scope="module")
def large() -> SanaTransformer2DModel:
    """SANA 1.6B without weights, by its published configuration."""
    with torch.device("meta"):
        return SanaTransformer2DModel(
            in_channels=32,
            out_channels=32,
            num_attention_heads=70,
            attention_head_dim=32,
            num_layers=20,
            num_cross_attention_heads=20,
            cross_attention_head_dim=112,
            cross_attention_dim=2240,
            caption_channels=2304,
            mlp_ratio=2.5,
            attention_bias=False,
            sample_size=32,
            patch_size=1,
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            interpolation_scale=None,
        )


def test_the_papers_list_quantises_feed_forward_and_cross_attentions_keys_and_values(
    large: SanaTransformer2DModel,
) -> None:
    quantised = {
        layer
        for layer, name in NATIVE.items()
        if not any(kept in f"blocks.0.{name}" for kept in KEPT) and SIZES[name] > KEPT_SIZE
    }
    selected = LayerPolicy(Sana.quantize, Sana.keep, Sana.keep_max_dim).select(large)
    assert set(selected) == {f"transformer_blocks.{i}.{layer}" for i in range(20) for layer in quantised}

    def run() -> None:
        text, mask = torch.zeros(1, 300, 2304, device="meta"), torch.ones(1, 300, device="meta")
        latents, at = torch.zeros(1, 32, 32, 32, device="meta"), torch.zeros(1, device="meta")
        large(latents, encoder_hidden_states=text, encoder_attention_mask=mask, timestep=at)

    flops = {name: n for name, n in linear_flops(large, run).items() if name.startswith("transformer_blocks.")}
    share = sum(flops[name] for name in selected) / sum(flops.values())
    print(f"SANA 1.6B at 1024 px: {share:.1%} of the blocks' linear FLOPs are quantised")
    assert share == pytest.approx(0.574, abs=0.002)


def test_at_fp8_all_of_the_blocks_is_quantised(large: SanaTransformer2DModel) -> None:
    wanted = {f"transformer_blocks.{i}.{layer}" for i in range(20) for layer in NATIVE}
    assert set(Sana.fp8_policy.select(large)) == wanted


def test_lora_targets_of_sana_are_the_papers(large: SanaTransformer2DModel, backbone: Backbone) -> None:
    targets = {layer for layer, name in NATIVE.items() if name in TARGETS}
    for model in (large, backbone.transformer):
        blocks = {name for name, _ in model.named_modules() if re.fullmatch(r"transformer_blocks\.\d+", name)}
        expected = {f"{block}.{layer}" for block in blocks for layer in targets}
        assert set(adapter_layout(model, Sana.lora_targets)) == expected
    assert len(adapter_layout(large, Sana.lora_targets)) == 20 * 8
