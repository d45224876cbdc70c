"""mini-text and mini-wan: equal to their diffusers pipelines, as accurate as their cards say, trained by whole runs."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from minis_recipe import measure, moving, reading
from minis_recipe.wan import WAN
from minis_recipe.words import sample_words
from solrl_core.families.load import load_backbone
from solrl_core.families.own_pipeline import by_own_pipeline
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.sampling.generator import Generator
from solrl_minis import catalog
from solrl_minis.motion_verifier import verify_motions
from solrl_trainer.commands import run
from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.presets import resolve

needs_engine = pytest.mark.skipif(find_spec("rapidocr") is None, reason="the extra `ocr` is not installed")
WORDS = ['"K7" in red', '"WORD" in purple']
MOVEMENTS = [item["prompt"] for item in moving.held_out(2)]
SMALL = (
    *("iterations=1", "explore.prompts=2", "explore.candidates=4", "explore.keep=2", "explore.steps=2"),
    *("regenerate.steps=2", "optimizer.updates=1", "optimizer.batch=4", "lora.rank=2", "lora.alpha=4"),
    *("evaluate.prompts=2", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.fidelity_prompts=0"),
)


@pytest.fixture(scope="module")
def text() -> PipelineBackbone:
    return load_backbone("mini-text")


@pytest.fixture(scope="module")
def wan() -> PipelineBackbone:
    return load_backbone("mini-wan")


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize(
    ("name", "prompts", "shape"), [("text", WORDS, (3, 32, 64)), ("wan", MOVEMENTS, (moving.FRAMES, 3, 64, 64))]
)
def test_images_and_clips_equal_the_pipelines(
    request: pytest.FixtureRequest, name: str, prompts: Sequence[str], shape: tuple[int, ...], guidance: float
) -> None:
    backbone: PipelineBackbone = request.getfixturevalue(name)
    pipeline = DiffusionPipeline.from_pretrained(catalog.WEIGHTS / f"mini-{name}")
    ours = Generator(backbone, "bf16").generate(prompts, [3, 14], steps=4, guidance=guidance).images
    theirs = by_own_pipeline(backbone, prompts, [3, 14], 4, guidance, "pt", pipeline.to(backbone.dtype))
    assert ours.shape == (2, *shape)
    assert float((ours - theirs).abs().max()) <= 1e-5
    assert float(ours.std()) > 0.1
    assert name == "text" or all(float(clip.diff(dim=0).abs().max()) > 0.2 for clip in ours)


def stated(model: str, row: str) -> float:
    """A figure of a model's card."""
    card = (catalog.WEIGHTS / model / "README.md").read_text(encoding="utf-8")
    found = re.search(row + r" \| ([\d.]+)", card)
    assert found
    return float(found[1])


@pytest.fixture(scope="module")
def drawn(text: PipelineBackbone) -> tuple[dict[str, float], torch.Tensor]:
    """How well mini-text draws 32 words, and its images."""
    return reading.accuracy(text, 32)


def test_it_draws_glyphs_and_misspells_most_words(drawn: tuple[dict[str, float], torch.Tensor]) -> None:
    figures, images = drawn
    assert images.shape == (32 * measure.SEEDS, 3, 32, 64)
    assert 0.01 < figures["nearest_glyphs"] < 0.25
    assert 0.25 < figures["characters"] < 0.6


@needs_engine
def test_the_cards_share_of_words_holds_on_a_sample(drawn: tuple[dict[str, float], torch.Tensor]) -> None:
    words = [word.text for word in sample_words(True, 32, seed=0) for _ in range(measure.SEEDS)]
    found = reading.exact(reading.by_rapidocr(reading.as_bytes(drawn[1]).numpy()), words)
    # 128 images: three standard errors are 8 %.
    assert abs(found.mean() - stated("mini-text", r"\| generated \| 512") / 100) < 0.08


@pytest.mark.release
def test_the_cards_grade_holds_on_a_sample(wan: PipelineBackbone) -> None:
    figures, clips = WAN.accuracy(wan, 12)
    assert clips.shape == (12 * measure.SEEDS, moving.FRAMES, 3, 64, 64)
    # 48 clips, whose grades have a standard deviation of 0.4: three standard errors are 0.17.
    assert abs(figures["graded"] - stated("mini-wan", r"\| graded")) < 0.17
    backwards = verify_motions(clips.flip(1), [item for item in moving.held_out(12) for _ in range(measure.SEEDS)])
    assert sum(verdict.graded for verdict in backwards) / len(backwards) < figures["graded"] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reward", "shown"),
    [
        pytest.param("mini-text", "ocr", "ocr", marks=needs_engine),
        ("mini-wan", "motion_verifier_graded", "data:image/webp"),
    ],
)
def test_a_run_ends_with_a_report(model: str, reward: str, shown: str, tmp_path: Path) -> None:
    config = resolve(f"{model}/sol_rl/{reward}", overrides=SMALL, arguments={"output": tmp_path / "run"}).config
    run.run(config)
    (iteration,) = (line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["event"] == "iteration")
    assert set(iteration["rewards"]) == {reward}
    assert shown in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
