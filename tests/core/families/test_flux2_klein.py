"""FLUX.2 [klein]: its schedule and positions, and its layers compared with those that the published baselines adapt."""

from collections import Counter

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from solrl_core.families.flux2_klein import Flux2Klein, position_ids
from solrl_core.lora import adapter_layout
from solrl_core.precision import LayerPolicy, linear_flops, share_of_flops
from tiny_models import Tiny, named_layers, variants


@variants("flux2-klein")
def test_the_shift_depends_on_the_steps(tiny: Tiny) -> None:
    """With the shift of 2 steps, the middle one of 4 steps would be the same."""
    assert tiny.backbone.sigmas(4)[2] != pytest.approx(tiny.backbone.sigmas(2)[1], abs=1e-4)


@variants("flux2-klein")
def test_positions_equal_the_pipelines(tiny: Tiny) -> None:
    cpu = torch.device("cpu")
    image = tiny.pipeline._prepare_latent_ids(torch.zeros(1, 16, 4, 6))[0]
    text = tiny.pipeline._prepare_text_ids(torch.zeros(1, 9, 32))[0]
    assert torch.equal(position_ids(1, 4, 6, 1, cpu), image)
    assert torch.equal(position_ids(1, 1, 1, 9, cpu), text)


@pytest.fixture(scope="module")
def large() -> Flux2Transformer2DModel:
    """FLUX.2 [klein] 4B without weights, by its published configuration."""
    with torch.device("meta"):
        return Flux2Transformer2DModel(
            num_layers=5,
            num_single_layers=20,
            num_attention_heads=24,
            joint_attention_dim=7680,
            guidance_embeds=False,
        )


def test_all_of_the_blocks_is_quantised(large: Flux2Transformer2DModel) -> None:
    """Their modulation is outside."""
    selected = LayerPolicy(Flux2Klein.quantize, Flux2Klein.keep).select(large)
    assert selected == Flux2Klein.fp8_policy.select(large)
    assert Counter(name.partition(".")[0] for name in selected) == {
        "transformer_blocks": 5 * 12,
        "single_transformer_blocks": 20 * 2,
    }

    def run() -> None:
        large(
            hidden_states=torch.zeros(1, 1024, 128, device="meta"),
            encoder_hidden_states=torch.zeros(1, 512, 7680, device="meta"),
            timestep=torch.ones(1, device="meta"),
            img_ids=torch.zeros(1024, 4, device="meta"),
            txt_ids=torch.zeros(512, 4, device="meta"),
        )

    flops = linear_flops(large, run)
    assert share_of_flops(flops, selected, Flux2Klein.blocks) == 1
    share = sum(flops[name] for name in selected) / sum(flops.values())
    print(f"FLUX.2 [klein] 4B at 512 px: {share:.2%} of all linear FLOPs are quantised, all of the blocks'")
    assert 0.99 < share < 1


@variants("flux2-klein")
def test_lora_targets_are_the_baselines(large: Flux2Transformer2DModel, tiny: Tiny) -> None:
    """Flow-Factory, src/flow_factory/models/flux/flux2_klein.py."""
    names = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
    names += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out", "attn.to_qkv_mlp_proj"]
    names += ["ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"]
    for model in (large, tiny.backbone.transformer):
        assert set(adapter_layout(model, Flux2Klein.lora_targets)) == named_layers(model, names)
    assert len(adapter_layout(large, Flux2Klein.lora_targets)) == 5 * 12 + 20
