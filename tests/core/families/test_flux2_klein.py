"""FLUX.2 [klein]: images compared with its diffusers pipeline, layers with those that the published baselines adapt."""

from collections import Counter

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from solrl_core.families.base import stack
from solrl_core.families.flux2_klein import Flux2Klein, position_ids
from solrl_core.lora import adapter_layout
from solrl_core.noise import initial_noise
from solrl_core.precision import LayerPolicy, linear_flops, share_of_flops
from tiny_pipelines import HEIGHT, PROMPTS, T5_TOKENS, WIDTH, Tiny, difference, sized

STEPS = 4
CHANNELS = 3 * 32


def by_diffusers(tiny: Tiny, prompts: list[str], seeds: list[int], guidance: float) -> torch.Tensor:
    """Images by the pipeline's own loop and schedule."""
    backbone = tiny.backbone
    images: torch.Tensor = tiny.pipeline(
        prompt=prompts,
        height=backbone.height,
        width=backbone.width,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        latents=initial_noise(seeds, backbone.latent_shape),
        max_sequence_length=T5_TOKENS,
        output_type="pt",
    ).images
    return images


@pytest.mark.parametrize("guidance", [1.0, 3.5])
@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (48, 64)])
def test_images_equal_the_pipelines(klein: Tiny, size: tuple[int, int], guidance: float) -> None:
    tiny = sized(klein, *size)
    ours = tiny.generator.generate(PROMPTS, [3, 14], steps=STEPS, guidance=guidance).images
    theirs = by_diffusers(tiny, PROMPTS, [3, 14], guidance)
    assert ours.shape == (2, 3, *size)
    assert difference(ours, theirs) <= 1e-5
    assert float(ours.std()) > 0.02


def test_prompt_and_guidance_affect_the_latents(klein: Tiny) -> None:
    def latents(prompt: str, guidance: float) -> torch.Tensor:
        return klein.generator.generate(prompt, [3], steps=2, guidance=guidance).latents

    plain, guided = latents(PROMPTS[0], 1.0), latents(PROMPTS[0], 3.5)
    assert difference(plain, latents(PROMPTS[1], 1.0)) > 1e-3
    assert (difference(plain, guided) > 1e-3) != klein.pipeline.config.is_distilled


@pytest.mark.parametrize("steps", [1, 6, 10])
def test_sigmas_equal_the_pipelines(klein: Tiny, steps: int) -> None:
    tiny = sized(klein, 64, 160)
    call = {"height": 64, "width": 160, "max_sequence_length": T5_TOKENS, "output_type": "latent"}
    tiny.pipeline(prompt=PROMPTS[0], num_inference_steps=steps, **call)
    sigmas = tiny.backbone.sigmas(steps)
    assert sigmas == tiny.pipeline.scheduler.sigmas.tolist()
    assert (len(sigmas), sigmas[0], sigmas[-1]) == (steps + 1, 1.0, 0.0)


def test_the_shift_depends_on_the_steps(klein: Tiny) -> None:
    """With the shift of 2 steps, the middle one of 4 steps would be the same."""
    assert klein.backbone.sigmas(4)[2] != pytest.approx(klein.backbone.sigmas(2)[1], abs=1e-4)


def test_positions_equal_the_pipelines(klein: Tiny) -> None:
    cpu = torch.device("cpu")
    image = klein.pipeline._prepare_latent_ids(torch.zeros(1, 16, 4, 6))[0]
    text = klein.pipeline._prepare_text_ids(torch.zeros(1, 9, 32))[0]
    assert torch.equal(position_ids(1, 4, 6, 1, cpu), image)
    assert torch.equal(position_ids(1, 1, 1, 9, cpu), text)


def test_prompts_encode_the_same_alone_and_together(klein: Tiny) -> None:
    together = klein.backbone.encode(PROMPTS, guidance=2.0)
    names = ["states"] if klein.pipeline.config.is_distilled else ["states", "negative_states"]
    assert {name: tuple(t.shape) for name, t in together.items()} == dict.fromkeys(names, (2, T5_TOKENS, CHANNELS))
    singly = stack([klein.backbone.encode([prompt], guidance=2.0) for prompt in PROMPTS])
    assert all(difference(singly[name], tensor) <= 1e-5 for name, tensor in together.items())
    assert klein.backbone.encode(PROMPTS).keys() == {"states"}


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


def test_lora_targets_are_the_baselines(large: Flux2Transformer2DModel, klein: Tiny) -> None:
    """Flow-Factory, src/flow_factory/models/flux/flux2_klein.py."""
    names = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
    names += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out", "attn.to_qkv_mlp_proj"]
    names += ["ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"]
    for model in (large, klein.backbone.transformer):
        # PEFT takes a list of names as ends of dotted names.
        ends = tuple(f".{name}" for name in names)
        expected = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name.endswith(ends)}
        assert set(adapter_layout(model, Flux2Klein.lora_targets)) == expected
    assert len(adapter_layout(large, Flux2Klein.lora_targets)) == 5 * 12 + 20
