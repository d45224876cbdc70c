"""Qwen-Image: images compared with its diffusers pipeline, layers with those that the published baselines adapt."""

from collections import Counter

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from solrl_core.families.base import stack
from solrl_core.families.qwen_image import Positions, QwenImage
from solrl_core.lora import adapter_layout
from solrl_core.noise import initial_noise
from solrl_core.precision import LayerPolicy, linear_flops, share_of_flops
from tiny_pipelines import HEIGHT, PROMPTS, T5_TOKENS, WIDTH, Tiny, difference, sized

STEPS = 4


def by_diffusers(tiny: Tiny, prompts: list[str], seeds: list[int], guidance: float) -> torch.Tensor:
    """Images by the pipeline's own loop and schedule, from noise that it packs itself."""
    backbone, pipeline = tiny.backbone, tiny.pipeline
    noise = initial_noise(seeds, backbone.latent_shape)
    images: torch.Tensor = pipeline(
        prompts,
        negative_prompt=[" "] * len(prompts) if guidance > 1 else None,
        true_cfg_scale=guidance,
        height=backbone.height,
        width=backbone.width,
        num_inference_steps=STEPS,
        latents=pipeline._pack_latents(noise, *noise.shape),
        max_sequence_length=T5_TOKENS,
        output_type="pt",
    ).images
    return images


@pytest.mark.parametrize("guidance", [1.0, 3.5])
@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (48, 64)])
def test_images_equal_the_pipelines(qwen_image: Tiny, size: tuple[int, int], guidance: float) -> None:
    """The second prompt is longer, so the pipeline pads the first, and this project both."""
    tiny = sized(qwen_image, *size)
    ours = tiny.generator.generate(PROMPTS, [3, 14], steps=STEPS, guidance=guidance).images
    theirs = by_diffusers(tiny, PROMPTS, [3, 14], guidance)
    assert ours.shape == (2, 3, *size)
    assert difference(ours, theirs) <= 1e-5
    assert float(ours.std()) > 0.02


def test_prompt_and_guidance_affect_the_latents(qwen_image: Tiny) -> None:
    def latents(prompt: str, guidance: float) -> torch.Tensor:
        return qwen_image.generator.generate(prompt, [3], steps=2, guidance=guidance).latents

    plain = latents(PROMPTS[0], 1.0)
    assert difference(plain, latents(PROMPTS[1], 1.0)) > 1e-3
    assert difference(plain, latents(PROMPTS[0], 3.5)) > 1e-3


@pytest.mark.parametrize("steps", [2, 6, 10])
def test_sigmas_equal_the_pipelines(qwen_image: Tiny, steps: int) -> None:
    tiny = sized(qwen_image, 64, 160)
    tiny.pipeline(PROMPTS[0], height=64, width=160, num_inference_steps=steps, output_type="latent")
    sigmas = tiny.backbone.sigmas(steps)
    assert sigmas == tiny.pipeline.scheduler.sigmas.tolist()
    assert (len(sigmas), sigmas[0], sigmas[-1]) == (steps + 1, 1.0, 0.0)
    assert sigmas[-2] == pytest.approx(0.02)


def test_one_step_goes_from_noise_to_the_image(qwen_image: Tiny) -> None:
    """The pipeline's own schedule would be NaN."""
    assert qwen_image.backbone.sigmas(1) == [1.0, 0.0]


def test_prompts_encode_the_same_alone_and_together(qwen_image: Tiny) -> None:
    together = qwen_image.backbone.encode(PROMPTS, guidance=2.0)
    assert {name: tuple(t.shape) for name, t in together.items()} == {
        "states": (2, T5_TOKENS, 32),
        "mask": (2, T5_TOKENS),
        "negative_states": (2, T5_TOKENS, 32),
        "negative_mask": (2, T5_TOKENS),
    }
    singly = stack([qwen_image.backbone.encode([prompt], guidance=2.0) for prompt in PROMPTS])
    assert all(difference(singly[name].float(), tensor.float()) <= 1e-5 for name, tensor in together.items())
    assert together["mask"].sum(1).tolist() == [8, 15]
    assert qwen_image.backbone.encode(PROMPTS).keys() == {"states", "mask"}


def test_padding_changes_no_velocity(qwen_image: Tiny) -> None:
    backbone = qwen_image.backbone
    rows, noise = backbone.encode(PROMPTS[:1]), initial_noise([3], backbone.latent_shape)
    other = rows | {"states": torch.where(rows["mask"][..., None], rows["states"], 7.0)}
    velocities = [backbone.velocity(backbone.transformer, noise, torch.tensor([0.5]), each) for each in (rows, other)]
    assert difference(*velocities) <= 1e-6


@pytest.mark.parametrize(("rows", "columns"), [(4, 6), (5, 3)])
def test_positions_equal_diffusers(rows: int, columns: int) -> None:
    sizes, device = [[(1, rows, columns)]] * 2, torch.device("cpu")
    theirs = QwenEmbedRope(10000, [4, 6, 6], scale_rope=True)(sizes, max_txt_seq_len=9, device=device)
    ours = Positions((4, 6, 6))(sizes, max_txt_seq_len=9, device=device)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def large() -> QwenImageTransformer2DModel:
    """Qwen-Image without weights, by its published configuration, which has diffusers' defaults."""
    with torch.device("meta"):
        return QwenImageTransformer2DModel()


def test_all_but_the_modulation_is_quantised(large: QwenImageTransformer2DModel) -> None:
    selected = LayerPolicy(QwenImage.quantize, QwenImage.keep).select(large)
    assert selected == QwenImage.fp8_policy.select(large)
    assert Counter(name.split(".", 2)[2] for name in selected).keys() == {
        *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"attn.{layer}" for layer in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *(f"{stream}_mlp.net.{layer}" for stream in ("img", "txt") for layer in ("0.proj", "2")),
    }

    def run() -> None:
        large(
            hidden_states=torch.zeros(1, 1024, 64, device="meta"),
            encoder_hidden_states=torch.zeros(1, 256, 3584, device="meta"),
            timestep=torch.ones(1, device="meta"),
            img_shapes=[[(1, 32, 32)]],
        )

    share = share_of_flops(linear_flops(large, run), selected, QwenImage.blocks)
    print(f"Qwen-Image at 512 px: {share:.2%} of the blocks' linear FLOPs are quantised")
    assert share == pytest.approx(0.9992, abs=0.0003)


def test_lora_targets_are_the_baselines(large: QwenImageTransformer2DModel, qwen_image: Tiny) -> None:
    """verl-omni, examples/flowgrpo_trainer/qwen_image/run_qwen_image_ocr_lora.sh."""
    names = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    names += ["img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"]
    for model in (large, qwen_image.backbone.transformer):
        # PEFT takes a list of names as ends of dotted names.
        ends = tuple(f".{name}" for name in names)
        expected = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name.endswith(ends)}
        assert set(adapter_layout(model, QwenImage.lora_targets)) == expected
    assert len(adapter_layout(large, QwenImage.lora_targets)) == 60 * 12
