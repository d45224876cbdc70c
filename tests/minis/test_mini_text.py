"""mini-text: equal to its diffusers pipeline, as accurate as its card says, and trained by a whole run with `ocr`."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from solrl_core.families.load import load_backbone
from solrl_core.families.own_pipeline import by_own_pipeline
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.rewards.ocr import wanted_text
from solrl_core.sampling.generator import Generator
from solrl_minis import catalog
from solrl_trainer.commands import run
from solrl_trainer.records.metrics_file import read_metrics
from solrl_trainer.settings.presets import resolve
from solrl_trainer.settings.prompts import find_prompts, read_prompts

from minis_recipe import measure, reading
from minis_recipe.words import LENGTHS, sample_words

needs_engine = pytest.mark.skipif(find_spec("rapidocr") is None, reason="the extra `ocr` is not installed")
PROMPTS = ['"K7" in red', '"WORD" in purple']
SMALL = (
    *("iterations=1", "explore.prompts=2", "explore.candidates=8", "explore.keep=4", "explore.steps=2"),
    *("regenerate.steps=2", "optimizer.updates=1", "optimizer.batch=8", "lora.rank=2", "lora.alpha=4"),
    *("evaluate.prompts=2", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.fidelity_prompts=0"),
)


@pytest.fixture(scope="module")
def backbone() -> PipelineBackbone:
    return load_backbone("mini-text")


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_images_equal_the_pipelines(backbone: PipelineBackbone, guidance: float) -> None:
    pipeline = DiffusionPipeline.from_pretrained(catalog.mini_text())
    ours = Generator(backbone, "bf16").generate(PROMPTS, [3, 14], steps=4, guidance=guidance).images
    theirs = by_own_pipeline(backbone, PROMPTS, [3, 14], 4, guidance, "pt", pipeline.to(backbone.dtype))
    assert ours.shape == (2, 3, 32, 64)
    assert float((ours - theirs).abs().max()) <= 1e-5
    assert float(ours.std()) > 0.1


def test_it_draws_glyphs_and_misspells_most_words(backbone: PipelineBackbone) -> None:
    figures, images = reading.accuracy(backbone, 32)
    assert images.shape == (32 * measure.SEEDS, 3, 32, 64)
    assert 0.01 < figures["nearest_glyphs"] < 0.25
    assert 0.25 < figures["characters"] < 0.6


@needs_engine
def test_the_cards_share_of_words_holds_on_a_sample(backbone: PipelineBackbone) -> None:
    words = [word for word in sample_words(True, 32, seed=0) for _ in range(measure.SEEDS)]
    found = reading.exact(
        reading.by_rapidocr(reading.as_bytes(reading.accuracy(backbone, 32)[1]).numpy()), [word.text for word in words]
    )
    card = (catalog.WEIGHTS / "mini-text" / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"\| generated \| 512 \| ([\d.]+)%", card)
    assert stated
    # 128 images: three standard errors are 8 %.
    assert abs(found.mean() - float(stated[1]) / 100) < 0.08


def test_its_prompts_have_their_words() -> None:
    for split in ("train", "test"):
        items = read_prompts(find_prompts("words"), split)
        assert len({wanted_text(item.text, {}) for item in items}) == len(items)
        assert all(wanted_text(item.text, {}) == item.metadata["text"] for item in items)
        assert {item.metadata["tag"] for item in items} == {f"{length} characters" for length in LENGTHS}


@needs_engine
@pytest.mark.slow
def test_a_run_with_ocr_ends_with_a_report(tmp_path: Path) -> None:
    config = resolve("mini-text/sol_rl/ocr", overrides=SMALL, arguments={"output": tmp_path / "run"}).config
    run.run(config)
    (iteration,) = (line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["event"] == "iteration")
    assert set(iteration["rewards"]) == {"ocr"}
    assert "ocr" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
