"""Every family compared with its diffusers pipeline."""

import pytest
from solrl_core.families.backbone import stack
from tests.core.families.tiny_models import Tiny, by_diffusers, sized
from tests.core.families.tiny_pipelines import FRAMES, HEIGHT, PROMPTS, QWEN_TOKENS, T5_TOKENS, WIDTH, difference

SEEDS = [3, 14]
ROWS: dict[str, dict[str, tuple[int, ...]]] = {
    "sd3": {"states": (77 + T5_TOKENS, 64), "pooled": (64,)},
    "flux": {"states": (T5_TOKENS, 64), "pooled": (32,)},
    "z-image": {"states": (QWEN_TOKENS, 64), "mask": (QWEN_TOKENS,)},
    "qwen-image": {"states": (T5_TOKENS, 32), "mask": (T5_TOKENS,)},
    "flux2-klein": {"states": (T5_TOKENS, 3 * 32)},
    "wan": {"states": (T5_TOKENS, 64)},
}
"""Shapes of a prompt's tensors by family."""
DISTILLED = ("flux/dev", "flux/schnell", "flux2-klein/distilled")
"""Models without classifier-free guidance; FLUX.1-dev embeds the guidance instead."""


def test_prompts_encode_the_same_alone_and_together_and_digests_cover_all_parts(tiny: Tiny) -> None:
    assert set(tiny.backbone.parts) == {part for part, found in tiny.pipeline.components.items() if found is not None}
    backbone = tiny.backbone
    expected = {name: (2, *shape) for name, shape in ROWS[backbone.family].items()}
    plain, guided = backbone.encode(PROMPTS), backbone.encode(PROMPTS, guidance=2.0)
    assert {name: tuple(tensor.shape) for name, tensor in plain.items()} == expected
    if tiny.name not in DISTILLED:
        expected |= {f"negative_{name}": shape for name, shape in expected.items()}
    assert {name: tuple(tensor.shape) for name, tensor in guided.items()} == expected
    singly = stack([backbone.encode([prompt], guidance=2.0) for prompt in PROMPTS])
    exact = backbone.family == "z-image"
    assert all(difference(singly[name].float(), x.float()) <= (0 if exact else 1e-5) for name, x in guided.items())


@pytest.mark.parametrize("guidance", [1.0, 3.5])
@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (80, 48)])
def test_images_equal_the_pipelines(tiny: Tiny, size: tuple[int, int], guidance: float) -> None:
    """The second prompt is longer, so a pipeline that pads pads the first; one size has odd numbers of patches."""
    tiny = sized(tiny, *size)
    ours = tiny.generator.generate(PROMPTS, SEEDS, steps=4, guidance=guidance).images
    theirs = by_diffusers(tiny, PROMPTS, SEEDS, 4, guidance)
    assert ours.shape == (2, *([FRAMES] if tiny.backbone.family == "wan" else []), 3, *size)
    # Z-Image's pipeline encodes one prompt at a time.
    assert difference(ours, theirs) <= (5e-5 if tiny.backbone.family == "z-image" else 1e-5)
    assert float(ours.std()) > 0.02


@pytest.mark.parametrize("steps", [1, 2, 6, 10])
def test_sigmas_equal_the_pipelines(tiny: Tiny, steps: int) -> None:
    tiny = sized(tiny, 64, 160)
    sigmas = tiny.backbone.sigmas(steps)
    assert (len(sigmas), sigmas[0], sigmas[-1]) == (steps + 1, 1.0, 0.0)
    if tiny.backbone.family == "qwen-image":
        if steps == 1:
            return  # the pipeline's own schedule would be NaN
        assert sigmas[-2] == pytest.approx(0.02)
    if tiny.backbone.family == "wan":
        tiny.pipeline.scheduler.set_timesteps(steps)  # UniPC keeps away from 1 by a millionth
        assert sigmas == pytest.approx(tiny.pipeline.scheduler.sigmas.tolist(), abs=1.1e-6)
        return
    by_diffusers(tiny, PROMPTS[:1], SEEDS[:1], steps, output_type="latent")
    assert sigmas == tiny.pipeline.scheduler.sigmas.tolist()
