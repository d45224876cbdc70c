"""FLUX.1: images compared with its diffusers pipeline, quantised layers with the paper's list."""

from collections import Counter

import pytest
import torch
from diffusers import FluxTransformer2DModel
from solrl_core.families.base import stack
from solrl_core.families.flux import Flux, pack, position_ids, unpack
from solrl_core.lora import adapter_layout
from solrl_core.noise import initial_noise
from solrl_core.precision import LayerPolicy, linear_flops
from tiny_pipelines import HEIGHT, PROMPTS, T5_TOKENS, WIDTH, Tiny, difference, sized

STEPS = 4


def by_diffusers(tiny: Tiny, prompts: list[str], seeds: list[int], guidance: float) -> torch.Tensor:
    """Images by the pipeline's own loop and schedule, from noise that it packs itself."""
    backbone, pipeline = tiny.backbone, tiny.pipeline
    noise = initial_noise(seeds, backbone.latent_shape)
    images: torch.Tensor = pipeline(
        prompts,
        height=backbone.height,
        width=backbone.width,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        latents=pipeline._pack_latents(noise, *noise.shape),
        max_sequence_length=T5_TOKENS,
        output_type="pt",
    ).images
    return images


@pytest.mark.parametrize("guidance", [1.0, 3.5])
@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (96, 64), (64, 64)])
def test_images_equal_the_pipelines(flux: Tiny, size: tuple[int, int], guidance: float) -> None:
    tiny = sized(flux, *size)
    ours = tiny.generator.generate(PROMPTS, [3, 14], steps=STEPS, guidance=guidance).images
    theirs = by_diffusers(tiny, PROMPTS, [3, 14], guidance)
    assert ours.shape == (2, 3, *size)
    assert difference(ours, theirs) <= 1e-5
    assert float(ours.std()) > 0.02


def test_prompt_and_guidance_affect_the_latents(flux: Tiny) -> None:
    def latents(prompt: str, guidance: float) -> torch.Tensor:
        return flux.generator.generate(prompt, [3], steps=2, guidance=guidance).latents

    plain, guided = latents(PROMPTS[0], 1.0), latents(PROMPTS[0], 3.5)
    assert difference(plain, latents(PROMPTS[1], 1.0)) > 1e-3
    if flux.pipeline.transformer.config.guidance_embeds:
        assert difference(plain, guided) > 1e-3
    else:
        assert torch.equal(plain, guided)


def test_the_position_of_a_patch_affects_the_velocity(flux: Tiny) -> None:
    backbone = flux.backbone
    rows, at = backbone.encode(PROMPTS[:1]), torch.tensor([0.5])
    noise = initial_noise([3], backbone.latent_shape)
    with torch.no_grad():
        here = backbone.velocity(backbone.transformer, noise, at, rows)
        there = backbone.velocity(backbone.transformer, noise.mT.contiguous(), at, rows)
    assert here.shape == noise.shape
    assert difference(here.mT, there) > 1e-3


def test_packing_equals_the_pipelines_and_unpacking_inverts_it(flux: Tiny) -> None:
    latents = torch.randn(2, 4, 8, 12)
    packed = pack(latents)
    assert torch.equal(packed, flux.pipeline._pack_latents(latents, *latents.shape))
    assert torch.equal(unpack(packed, 4, 6), latents)
    assert torch.equal(unpack(packed, 4, 6), flux.pipeline._unpack_latents(packed, 64, 96, 8))
    theirs = flux.pipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32)
    assert torch.equal(position_ids(4, 6, torch.device("cpu")), theirs)


@pytest.mark.parametrize("steps", [1, 6, 10])
def test_sigmas_equal_the_pipelines(flux: Tiny, steps: int) -> None:
    tiny = sized(flux, 64, 160)
    tiny.pipeline(PROMPTS[0], height=64, width=160, num_inference_steps=steps, output_type="latent")
    sigmas = tiny.backbone.sigmas(steps)
    assert sigmas == tiny.pipeline.scheduler.sigmas.tolist()
    assert (len(sigmas), sigmas[0], sigmas[-1]) == (steps + 1, 1.0, 0.0)
    shifted = flux.pipeline.scheduler.config.use_dynamic_shifting
    assert (sized(flux, 640, 640).backbone.sigmas(6) != flux.backbone.sigmas(6)) == shifted


def test_prompts_encode_the_same_alone_and_together(flux: Tiny) -> None:
    together = flux.backbone.encode(PROMPTS)
    shapes = {name: tuple(tensor.shape) for name, tensor in together.items()}
    assert shapes == {"states": (2, T5_TOKENS, 64), "pooled": (2, 32)}
    singly = stack([flux.backbone.encode([prompt], guidance=3.5) for prompt in PROMPTS])
    assert all(difference(singly[name], tensor) <= 1e-5 for name, tensor in together.items())


def test_digests_cover_all_parts_of_an_image(flux: Tiny) -> None:
    encoders = {"text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"}
    assert set(flux.backbone.parts) == {"transformer", "vae", "scheduler"} | encoders


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


def test_lora_targets_of_flux1_dev_are_the_papers(dev: FluxTransformer2DModel, flux: Tiny) -> None:
    for model in (dev, flux.backbone.transformer):
        # PEFT takes a list of names as ends of dotted names.
        ends = (".to_k", ".to_q", ".to_v", ".to_out.0")
        expected = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name.endswith(ends)}
        assert set(adapter_layout(model, Flux.lora_targets)) == expected
    assert len(adapter_layout(dev, Flux.lora_targets)) == 19 * 4 + 38 * 3
