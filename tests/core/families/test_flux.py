"""FLUX.1: its packed latents and its schedule, and quantised layers and LoRA targets compared with the paper's list."""

from collections import Counter

import pytest
import torch
from diffusers import FluxTransformer2DModel
from solrl_core.families.flux import Flux, pack, position_ids, unpack
from solrl_core.lora import adapter_layout
from solrl_core.precision import LayerPolicy, linear_flops
from solrl_core.sampling.noise import initial_noise
from tiny_models import Tiny, named_layers, sized, variants
from tiny_pipelines import PROMPTS, difference


@variants("flux")
def test_the_position_of_a_patch_affects_the_velocity(tiny: Tiny) -> None:
    backbone = tiny.backbone
    rows, at = backbone.encode(PROMPTS[:1]), torch.tensor([0.5])
    noise = initial_noise([3], backbone.latent_shape)
    with torch.no_grad():
        here = backbone.velocity(backbone.transformer, noise, at, rows)
        there = backbone.velocity(backbone.transformer, noise.mT.contiguous(), at, rows)
    assert here.shape == noise.shape
    assert difference(here.mT, there) > 1e-3


@variants("flux")
def test_packing_equals_the_pipelines_and_unpacking_inverts_it(tiny: Tiny) -> None:
    latents = torch.randn(2, 4, 8, 12)
    packed = pack(latents)
    assert torch.equal(packed, tiny.pipeline._pack_latents(latents, *latents.shape))
    assert torch.equal(unpack(packed, 4, 6), latents)
    assert torch.equal(unpack(packed, 4, 6), tiny.pipeline._unpack_latents(packed, 64, 96, 8))
    theirs = tiny.pipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32)
    assert torch.equal(position_ids(4, 6, torch.device("cpu")), theirs)


@variants("flux")
def test_the_shift_depends_on_the_size_if_it_is_dynamic(tiny: Tiny) -> None:
    shifted = tiny.pipeline.scheduler.config.use_dynamic_shifting
    assert (sized(tiny, 640, 640).backbone.sigmas(6) != tiny.backbone.sigmas(6)) == shifted


@variants("flux")
def test_digests_cover_all_parts_of_an_image(tiny: Tiny) -> None:
    encoders = {"text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"}
    assert set(tiny.backbone.parts) == {"transformer", "vae", "scheduler"} | encoders


@pytest.fixture(scope="module")
def dev() -> FluxTransformer2DModel:
    """FLUX.1-dev without weights, by its published configuration."""
    with torch.device("meta"):
        return FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=19,
            num_single_layers=38,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=4096,
            pooled_projection_dim=768,
            guidance_embeds=True,
            axes_dims_rope=(16, 56, 56),
        )


def test_the_papers_list_quantises_every_layer_of_flux1_devs_blocks(dev: FluxTransformer2DModel) -> None:
    selected = LayerPolicy(Flux.quantize, Flux.keep, Flux.keep_max_dim).select(dev)
    within: dict[str, list[str]] = {"transformer_blocks": [], "single_transformer_blocks": [], "proj_out": []}
    for name in selected:
        block, *rest = name.split(".", 2)
        within[block].append(rest[1] if rest else "")
    attention = ["to_q", "to_k", "to_v"]
    text = ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    double = ["norm1.linear", "norm1_context.linear", *(f"attn.{name}" for name in [*attention, "to_out.0", *text])]
    double += [f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")]
    single = ["norm.linear", "proj_mlp", "proj_out", *(f"attn.{name}" for name in attention)]
    assert Counter(within["transformer_blocks"]) == dict.fromkeys(double, 19)
    assert Counter(within["single_transformer_blocks"]) == dict.fromkeys(single, 38)
    assert within["proj_out"] == [""]
    assert len(selected) == 19 * 14 + 38 * 6 + 1

    def run() -> None:
        dev(
            torch.zeros(1, 1024, 64, device="meta"),
            encoder_hidden_states=torch.zeros(1, 128, 4096, device="meta"),
            pooled_projections=torch.zeros(1, 768, device="meta"),
            timestep=torch.ones(1, device="meta"),
            guidance=torch.ones(1, device="meta"),
            img_ids=torch.zeros(1024, 3, device="meta"),
            txt_ids=torch.zeros(128, 3, device="meta"),
        )

    flops = linear_flops(dev, run)
    blocks = sum(n for name, n in flops.items() if name.startswith(tuple(f"{block}." for block in Flux.blocks)))
    share = sum(flops[name] for name in selected) / sum(flops.values())
    print(f"FLUX.1-dev at 512 px: {share:.1%} of all linear FLOPs are quantised, all of the blocks'")
    assert blocks == sum(flops[name] for name in selected if name != "proj_out")
    assert 0.998 < share < 1


@variants("flux")
def test_lora_targets_of_flux1_dev_are_the_papers(dev: FluxTransformer2DModel, tiny: Tiny) -> None:
    for model in (dev, tiny.backbone.transformer):
        names = ["to_k", "to_q", "to_v", "to_out.0"]
        assert set(adapter_layout(model, Flux.lora_targets)) == named_layers(model, names)
    assert len(adapter_layout(dev, Flux.lora_targets)) == 19 * 4 + 38 * 3
