"""Wan: its clips, its prompts, its memory, and what it refuses."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from solrl_core.families import load_backbone
from solrl_core.families.own_pipeline import by_own_pipeline
from solrl_core.families.skeleton import load_skeleton
from solrl_core.memory_plan import plan_memory
from solrl_core.model_options import ImageSize
from solrl_core.precision import fp8
from solrl_core.precision.layer_policy import apply_policy
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.noise import initial_noise
from tests.core.families.tiny_models import Tiny, by_diffusers, variants
from tests.core.families.tiny_pipelines import PROMPTS, T5_TOKENS, difference, write_wan
from tests.support.tiny_skeletons import write_tiny

SEEDS = [3, 14]


@pytest.mark.parametrize(("frames", "shape"), [(1, (3,)), (9, (9, 3))])
def test_clips_and_images_of_wan_2_2_equal_the_pipelines(frames: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    backbone = load_backbone(str(write_wan(tmp_path / "wan", residual=True)), size=ImageSize(64, 96, frames))
    assert backbone.latent_shape == (4, (frames + 3) // 4, 4, 6)
    ours = Generator(backbone, "bf16").generate(PROMPTS, SEEDS, steps=3, guidance=3.5).images
    assert ours.shape == (2, *shape, 64, 96)
    assert difference(ours, by_own_pipeline(backbone, PROMPTS, SEEDS, 3, 3.5)) <= 1e-5


@variants("wan")
def test_latents_equal_the_pipelines_and_threads_decode_at_once(tiny: Tiny) -> None:
    made = tiny.generator.generate(PROMPTS, SEEDS, steps=4, guidance=5.0, decode=False)
    assert difference(made.latents, by_diffusers(tiny, PROMPTS, SEEDS, 4, 5.0, "latent")) <= 1e-5
    latents = initial_noise(range(4), tiny.backbone.latent_shape)
    expected = tiny.backbone.decode(latents)
    with ThreadPoolExecutor(4) as pool:
        alone = torch.cat(list(pool.map(tiny.backbone.decode, latents.split(1))))
    assert difference(alone, expected) <= 1e-5


@variants("wan")
def test_prompts_are_cleaned_as_the_pipeline_cleans_them(tiny: Tiny) -> None:
    backbone = tiny.backbone
    untidy = " a  red\n&amp;amp; blue circle"
    options = {"do_classifier_free_guidance": False, "max_sequence_length": T5_TOKENS}
    theirs, _ = tiny.pipeline.encode_prompt([untidy], **options)
    for text in (untidy, "a red & blue circle"):
        assert difference(backbone.encode([text])["states"], theirs) <= 1e-5
    letters = "z" * (T5_TOKENS - 2)  # a token before them, and one after
    assert backbone.truncated_tokens([untidy, letters, letters + "   zzz"]) == [0, 0, 4]


@pytest.mark.parametrize("frames", [4, 6])
def test_numbers_of_frames_between_latents_are_refused(frames: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"got clips of {frames} frames; .* needs 1 more than a multiple of 4"):
        load_backbone(str(write_wan(tmp_path / "wan")), size=ImageSize(frames=frames))
    with pytest.raises(ValueError, match="got clips of 5 frames; mini-sana makes images: omit frames"):
        load_backbone("mini-sana", size=ImageSize(frames=5))


def test_a_model_of_two_transformers_is_refused(tmp_path: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(write_wan(tmp_path / "wan"))
    pipeline.register_modules(transformer_2=pipeline.transformer)
    pipeline.save_pretrained(tmp_path / "two")
    assert json.loads((tmp_path / "two" / "model_index.json").read_text())["transformer_2"][0] == "diffusers"
    with pytest.raises(ValueError, match=r"two has two transformers, .*; expected a Wan with one"):
        load_backbone(str(tmp_path / "two"))


@pytest.mark.release
def test_memory_grows_with_the_frames(tmp_path: Path) -> None:
    folder = str(write_tiny("wan", tmp_path / "wan"))
    sizes = [ImageSize(64, 96, frames) for frames in (33, 65, 97)]
    plans = [plan_memory(load_skeleton(folder, size=size), ["bf16", "fp8"], 2) for size in sizes]
    assert plans[0].weights == plans[2].weights
    assert plans[0].activations["encode"] == plans[2].activations["encode"] > 0
    for phase in ("denoise, bf16", "denoise, fp8", "decode"):
        first, second, third = (plan.activations[phase] for plan in plans)
        # In proportion to the tokens: attention's scores are not stored.
        assert third - second == pytest.approx(second - first, rel=0.2)
        assert second - first > 0.1 * first


@torch.no_grad()
@pytest.mark.usefixtures("fp8_in_float32")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fused_blocks_keep_the_dtypes_of_a_gpu(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, the weights are BF16 except norms, modulation and time embedding, which stay in float32."""
    backbone = load_backbone(str(write_wan(tmp_path / "wan")), dtype=torch.bfloat16)
    assert backbone.dtype == torch.bfloat16
    assert backbone.transformer.get_parameter("scale_shift_table").dtype == torch.float32
    product = fp8.product
    monkeypatch.setattr(fp8, "product", lambda *given: product(*given).bfloat16())
    latents, rows = initial_noise(SEEDS, backbone.latent_shape), backbone.encode(PROMPTS, 2.0)

    def velocity(transformer: torch.nn.Module) -> torch.Tensor:
        return backbone.velocity(transformer, latents, torch.tensor([0.9, 0.2]), rows, 2.0)

    exact, transformer = velocity(backbone.transformer), copy.deepcopy(backbone.transformer)
    if precision == "fp8":
        apply_policy(transformer, backbone.fp8_policy, "fp8")
    backbone.fuse(transformer)
    found = velocity(transformer)
    for block in transformer.get_submodule("blocks").children():
        block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.equal(velocity(transformer), found)
    assert difference(found, exact) <= (0.01 if precision == "bf16" else 0.1) * float(exact.abs().max())
    assert backbone.decode(latents).dtype == torch.float32
