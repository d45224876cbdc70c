"""What is particular to a family beside what its pipeline computes: padding, compiled blocks, unread tokens, images."""

import copy
from dataclasses import replace

import pytest
import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.z_image import ZImage, ZImageFusedBlock
from solrl_core.precision.layer_policy import LayerPolicy, apply_policy
from tests.core.families.tiny_models import ONE_EACH, Tiny, variants
from tests.core.families.tiny_pipelines import PROMPTS, QWEN_TOKENS, difference
from torch._dynamo.testing import CompileCounterWithBackend


@variants("z-image")
def test_padding_holds_nothing_and_tokens_beyond_the_limit_are_not_read(tiny: Tiny) -> None:
    rows = tiny.backbone.encode(PROMPTS)
    assert not rows["states"][rows["mask"] == 0].any()
    backbone = tiny.backbone
    # The tokenizer has a token for each letter; 6 come before the prompt: the start of the message, user and newline.
    fits = "a" * (QWEN_TOKENS - 6)
    assert backbone.truncated_tokens([*PROMPTS, fits, fits + "bcd"]) == [0, 0, 0, 3]
    one, other = (backbone.encode([text])["states"] for text in (fits, fits + "bcd"))
    assert torch.equal(one, other)


@pytest.mark.release
@pytest.mark.usefixtures("fp8_in_float32")
def test_blocks_compile_for_any_number_of_tokens() -> None:
    """The first number of tokens has its own graph; all others share one."""
    block = ZImageFusedBlock(ZImageTransformerBlock(0, 48, 3, 3, 1e-5, qk_norm=True, modulation=False))
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


@pytest.mark.parametrize("tiny", ONE_EACH, indirect=True)
def test_the_decoder_gets_what_the_autoencoder_found(tiny: Tiny) -> None:
    """`decode` undoes the normalisation of `encode_images`, whatever it is: the autoencoder decodes its own latents."""
    backbone = tiny.backbone
    vae = copy.copy(backbone.pipeline.vae)
    frames = [backbone.frames] if backbone.frames > 1 else []
    images = torch.rand(2, *frames, 3, backbone.height, backbone.width, generator=torch.Generator().manual_seed(1))
    latents = backbone.encode_images(images)
    assert latents.shape == (2, *backbone.latent_shape)
    assert latents.dtype == torch.float32
    video = images.transpose(1, 2) if frames else images
    if any(one.ndim == 5 for one in vae.parameters()) and not frames:
        video = images[:, :, None]
    with torch.no_grad():
        encoded = vae.encode((2 * video - 1).to(vae.dtype), return_dict=False)[0]
        own = encoded if isinstance(encoded, torch.Tensor) else encoded.mode()
        expected = vae.decode(own, return_dict=False)[0]
        expected = expected.transpose(1, 2) if frames else expected.view(*images.shape)
    assert torch.allclose(backbone.decode(latents), (expected.float() / 2 + 0.5).clamp(0, 1), atol=2e-2)


@pytest.mark.parametrize("tiny", ["sana/mini"], indirect=True)
def test_a_trained_autoencoder_gives_the_image_back(tiny: Tiny) -> None:
    made = tiny.generator.generate(["two red circles"], [7], steps=4).images
    again = tiny.backbone.decode(tiny.backbone.encode_images(made))
    assert float((again - made).square().mean().log10() * -10) > 25


WORDS = ("red", "blue", "circle", "square", "two", "small", "green", "cross")


@pytest.fixture(scope="module", params=["mini-sana", "mini-sana with an instruction", "mini-sd3", "mini-flux"])
def backbone(request: pytest.FixtureRequest) -> Backbone:
    name, _, instructed = request.param.partition(" with ")
    loaded = load_backbone(name)
    if instructed:
        loaded.options = replace(loaded.options, complex_human_instruction=["describe well", "user prompt: "])
    return loaded


def test_prompts_that_differ_in_unread_tokens_alone_are_one(backbone: Backbone) -> None:
    seen = []
    for length in range(1, 24):
        start = " ".join(WORDS[i % len(WORDS)] for i in range(length))
        first, second = f"{start} circle", f"{start} square"
        one, other = backbone.encode([first]), backbone.encode([second])
        same = all(torch.equal(one[name], other[name]) for name in one)
        unread = backbone.truncated_tokens([first, second])
        assert (min(unread) > 0) == same, (length, unread)
        seen.append(unread[0])
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert 0 < seen[-1] < 24
