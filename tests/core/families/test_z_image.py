"""Z-Image: images compared with its diffusers pipeline, fused blocks with diffusers', and its true configuration."""

import copy
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from solrl_core.families.base import stack
from solrl_core.families.load import pipeline_call
from solrl_core.families.skeleton import Meta, load_skeleton
from solrl_core.families.z_image import ZImage
from solrl_core.families.z_image_fused import FusedBlock
from solrl_core.lora import adapter_layout
from solrl_core.noise import initial_noise
from solrl_core.precision import LayerPolicy, apply_policy, fp8
from tiny_pipelines import HEIGHT, PROMPTS, QWEN_TOKENS, WIDTH, Tiny, difference, sized
from torch._dynamo.testing import CompileCounterWithBackend
from true_shapes import write_skeleton

STEPS = 4


def by_diffusers(tiny: Tiny, prompts: list[str], seeds: list[int], guidance: float) -> torch.Tensor:
    """Images by the pipeline's own loop and schedule."""
    backbone = tiny.backbone
    images: torch.Tensor = tiny.pipeline(
        list(prompts),  # the pipeline writes into it
        height=backbone.height,
        width=backbone.width,
        num_inference_steps=STEPS,
        guidance_scale=guidance - 1,
        latents=initial_noise(seeds, backbone.latent_shape),
        max_sequence_length=QWEN_TOKENS,
        output_type="pt",
    ).images
    return images


@pytest.mark.parametrize("guidance", [1.0, 3.5])
@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (64, 64)])
def test_images_equal_the_pipelines(z_image: Tiny, size: tuple[int, int], guidance: float) -> None:
    tiny = sized(z_image, *size)
    ours = tiny.generator.generate(PROMPTS, [3, 14], steps=STEPS, guidance=guidance).images
    theirs = by_diffusers(tiny, PROMPTS, [3, 14], guidance)
    assert ours.shape == (2, 3, *size)
    assert difference(ours, theirs) <= 5e-5  # one prompt is encoded at a time here, and padded there
    assert float(ours.std()) > 0.02
    assert difference(theirs, by_diffusers(tiny, PROMPTS[::-1], [3, 14], guidance)) > 1e-3


@pytest.mark.parametrize("steps", [1, 6, 10])
def test_sigmas_equal_the_pipelines(z_image: Tiny, steps: int) -> None:
    latents = torch.zeros(1, *z_image.backbone.latent_shape)
    call = {"height": HEIGHT, "width": WIDTH, "max_sequence_length": QWEN_TOKENS, "guidance_scale": 0.0}
    z_image.pipeline(PROMPTS[0], num_inference_steps=steps, latents=latents, output_type="latent", **call)
    sigmas = z_image.backbone.sigmas(steps)
    assert sigmas == z_image.pipeline.scheduler.sigmas.tolist()
    assert (len(sigmas), sigmas[0], sigmas[-1]) == (steps + 1, 1.0, 0.0)


def test_prompts_are_padded_and_encode_the_same_alone_and_together(z_image: Tiny) -> None:
    backbone = z_image.backbone
    together = backbone.encode(PROMPTS, guidance=2.0)
    states, mask = (2, QWEN_TOKENS, 64), (2, QWEN_TOKENS)
    shapes = {"states": states, "mask": mask, "negative_states": states, "negative_mask": mask}
    assert {name: tuple(tensor.shape) for name, tensor in together.items()} == shapes
    singly = stack([backbone.encode([prompt], guidance=2.0) for prompt in PROMPTS])
    assert all(torch.equal(singly[name], tensor) for name, tensor in together.items())
    assert not together["states"][together["mask"] == 0].any()
    assert backbone.encode(PROMPTS).keys() == {"states", "mask"}


def test_tokens_beyond_the_limit_are_not_read(z_image: Tiny) -> None:
    backbone = z_image.backbone
    # The tokenizer has a token for each letter; 6 come before the prompt: the start of the message, user and newline.
    fits = "a" * (QWEN_TOKENS - 6)
    assert backbone.unread_tokens([*PROMPTS, fits, fits + "bcd"]) == [0, 0, 0, 3]
    one, other = (backbone.encode([text])["states"] for text in (fits, fits + "bcd"))
    assert torch.equal(one, other)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1] * 2], ids=["unequal", "equal"])
def test_a_fused_transformer_equals_diffusers(z_image: Tiny, prompts: list[str]) -> None:
    backbone = z_image.backbone
    fused = copy.deepcopy(backbone.transformer)
    backbone.fuse(fused)
    assert fused.state_dict().keys() == backbone.transformer.state_dict().keys()
    latents, sigma = initial_noise([3, 14], backbone.latent_shape), torch.tensor([0.9, 0.2])
    rows = backbone.encode(prompts)
    found = []
    for transformer in (fused, backbone.transformer):
        x = latents.clone().requires_grad_()
        velocity = backbone.velocity(transformer, x, sigma, rows)
        (gradient,) = torch.autograd.grad(velocity.square().sum(), x)
        found.append((velocity.detach(), gradient))
    for ours, theirs in zip(*found, strict=True):
        assert difference(ours, theirs) <= 1e-4 * float(theirs.abs().max())


@pytest.mark.usefixtures("fp8_in_float32")
def test_a_fused_transformer_quantises_a_shared_input_once(z_image: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = z_image.backbone
    plain = copy.deepcopy(backbone.transformer)
    apply_policy(plain, backbone.fp8_policy, "fp8")
    fused = copy.deepcopy(plain)
    backbone.fuse(fused)
    latents, sigma = initial_noise([3, 14], backbone.latent_shape), torch.tensor([0.9, 0.2])
    rows = backbone.encode(PROMPTS)
    with torch.no_grad():
        exact, theirs = (backbone.velocity(each, latents, sigma, rows) for each in (backbone.transformer, plain))
        quantize, calls = fp8.quantize_rows, []
        monkeypatch.setattr(fp8, "quantize_rows", lambda x, activation: calls.append(x) or quantize(x, activation))
        ours = backbone.velocity(fused, latents, sigma, rows)
    off = torch.linalg.norm(theirs - exact)
    assert off > 0.002 * torch.linalg.norm(exact)
    assert torch.linalg.norm(ours - theirs) < 0.2 * off
    # In each of four blocks: for the attention and its last layer, and for the feed-forward and its last layer.
    assert len(calls) == 4 * 4


@pytest.mark.usefixtures("fp8_in_float32")
def test_blocks_compile_for_any_number_of_tokens() -> None:
    """The first number of tokens has its own graph; all others share one."""
    block = FusedBlock(ZImageTransformerBlock(0, 48, 3, 3, 1e-5, qk_norm=True, modulation=False))
    apply_policy(block, LayerPolicy(quantize=("",)), "fp8")
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=graphs, dynamic=False if ZImage.one_length else None, fullgraph=True)
    for tokens in (32, 64, 96, 128):
        x, angles = torch.randn(2, tokens, 48), torch.randn(2, tokens, 8, 2)
        with torch.no_grad():
            expected = block(x, None, angles)
            assert difference(compiled(x, None, angles), expected) <= 1e-4 * float(expected.abs().max())
    assert graphs.frame_count == 2


def test_the_published_model(tmp_path: Path) -> None:
    """Size, schedule, layers and LoRA targets at the true configuration."""
    folder = write_skeleton("z-image", None, tmp_path / "z-image")
    model = load_skeleton(str(folder))
    assert (model.family, model.height, model.latent_shape) == ("z-image", 512, (16, 64, 64))
    call = {"guidance_scale": 4.0, "height": 512, "width": 512, "max_sequence_length": 512}
    assert pipeline_call(str(folder), 5.0) == call
    layout = adapter_layout(model.transformer, model.lora_targets)
    assert len(layout) == 34 * 4
    assert set(layout.values()) == {(3840, 3840)}
    with Meta():
        shares = {precision: model.quantized_share(precision) for precision in ("nvfp4", "fp8")}
    print(f"Z-Image at 512 px: {shares['nvfp4']:.1%} of the blocks' linear FLOPs at NVFP4, {shares['fp8']:.1%} at FP8")
    assert shares == {"nvfp4": pytest.approx(0.9375, abs=0.001), "fp8": pytest.approx(1.0, abs=0.001)}
