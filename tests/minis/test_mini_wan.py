"""mini-wan: its clips equal its diffusers pipeline's and move as its card says; a run trains by its verifier."""

import re
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from solrl_core.families.load import load_backbone
from solrl_core.families.own_pipeline import by_own_pipeline
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.sampling.generator import Generator
from solrl_minis import catalog
from solrl_minis.motion_verifier import check_metadata, verify_motions
from solrl_trainer.commands import run
from solrl_trainer.records.metrics_file import read_metrics
from solrl_trainer.settings.presets import resolve
from solrl_trainer.settings.prompts import find_prompts, read_prompts

from minis_recipe import measure, moving
from minis_recipe.wan import WAN

CARD = catalog.WEIGHTS / "mini-wan" / "README.md"
SMALL = (
    *("iterations=1", "explore.prompts=2", "explore.candidates=4", "explore.keep=2", "explore.steps=2"),
    *("regenerate.steps=2", "optimizer.updates=1", "optimizer.batch=4", "lora.rank=2", "lora.alpha=4"),
    *("evaluate.prompts=2", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.fidelity_prompts=0"),
)


@pytest.fixture(scope="module")
def backbone() -> PipelineBackbone:
    return load_backbone("mini-wan")


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_clips_equal_the_pipelines(backbone: PipelineBackbone, guidance: float) -> None:
    prompts = [item["prompt"] for item in moving.held_out(2)]
    pipeline = DiffusionPipeline.from_pretrained(catalog.mini_wan())
    ours = Generator(backbone, "bf16").generate(prompts, [3, 14], steps=4, guidance=guidance).images
    theirs = by_own_pipeline(backbone, prompts, [3, 14], 4, guidance, "pt", pipeline.to(backbone.dtype))
    assert ours.shape == (2, moving.FRAMES, 3, 64, 64)
    assert float((ours - theirs).abs().max()) <= 1e-5
    assert all(float(clip.diff(dim=0).abs().max()) > 0.2 for clip in ours)


@pytest.mark.release
def test_the_cards_grade_holds_on_a_sample(backbone: PipelineBackbone) -> None:
    figures, clips = WAN.accuracy(backbone, 12)
    assert clips.shape == (12 * measure.SEEDS, moving.FRAMES, 3, 64, 64)
    stated = re.search(r"\| graded \| ([\d.]+)", CARD.read_text(encoding="utf-8"))
    assert stated
    # 48 clips, whose grades have a standard deviation of 0.4: three standard errors are 0.17.
    assert abs(figures["graded"] - float(stated[1])) < 0.17
    backwards = verify_motions(clips.flip(1), [item for item in moving.held_out(12) for _ in range(measure.SEEDS)])
    assert sum(verdict.graded for verdict in backwards) / len(backwards) < figures["graded"] - 0.1


def test_its_prompts_have_metadata_that_the_verifier_reads() -> None:
    for split, count in (("train", 1024), ("test", 128)):
        items = read_prompts(find_prompts("moving"), split)
        assert len(items) == count == len({item.text for item in items})
        assert {item.metadata["tag"] for item in items} == set(moving.KINDS)
        for item in items:
            check_metadata(item.metadata)


@pytest.mark.slow
def test_a_run_with_its_verifier_ends_with_a_report_that_plays(tmp_path: Path) -> None:
    preset = "mini-wan/sol_rl/motion_verifier_graded"
    config = resolve(preset, overrides=SMALL, arguments={"output": tmp_path / "run"}).config
    run.run(config)
    (iteration,) = (line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["event"] == "iteration")
    assert set(iteration["rewards"]) == {"motion_verifier_graded"}
    assert "data:image/webp" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
