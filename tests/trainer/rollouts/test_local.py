"""Recipes that train on locally generated candidates, without a service."""

import json
from pathlib import Path

import pytest
import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.rewards import RewardSet
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_proto.noise import expand_seeds
from solrl_trainer.commands.run import run
from solrl_trainer.prompts.prompt_sets import PromptSet, find_prompts, read_prompts
from solrl_trainer.rollouts.device_source import DeviceSource
from solrl_trainer.rollouts.exploration import ExplorationSummary, seed_root
from solrl_trainer.rollouts.loading import Loaded
from solrl_trainer.rollouts.models import Models
from solrl_trainer.rollouts.selection import best_worst, select
from solrl_trainer.settings.config import RunConfig
from tests.support.small_model import small_model
from tests.trainer.training_helpers import TINY, events, run_config

SMALL = (
    *TINY,
    *("explore.prompts=1", "explore.candidates=12", "explore.keep=4", "explore.steps=2", "regenerate.steps=2"),
    *("evaluate.prompts=2", "evaluate.seeds=1", "evaluate.steps=1", "iterations=1"),
)


def config_of(recipe: str, output: Path, *more: str) -> RunConfig:
    return run_config(f"mini-sana/{recipe}/clipscore", output, *SMALL, *more)


@pytest.mark.parametrize("recipe", ["diffusionnft", "naive_quant"])
def test_a_local_recipe_runs_without_a_service(recipe: str, tmp_path: Path) -> None:
    summary = run(config_of(recipe, tmp_path, f"model={small_model()}", "evaluate.fidelity_prompts=1"))
    (line,) = events(tmp_path, "iteration")
    assert line["precision"] == ("nvfp4" if recipe == "naive_quant" else "bf16")
    assert line["seconds"].keys() == {"explore", "train"}
    assert [(one["of"], one["by"]) for one in line["scoring"]] == [("samples", "trainer")]
    assert line["reward_best"] > line["reward_worst"]
    assert (summary["spearman"] is not None) == (recipe == "naive_quant")
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(summary))
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sol_rl", "flowgrpo"])
def test_groups_made_together_are_as_made_alone(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = (f"model={small_model()}", "explore.prompts=3", "evaluate.fidelity_prompts=3")
    config = config_of(recipe, tmp_path / "alone", *changes)
    alone = run(config)
    monkeypatch.setattr(AdaptiveBatchSize, "groups", lambda *_: 2)
    together = run(config.model_copy(update={"output": tmp_path / "together"}))
    # Rewards round by the size of their batch.
    assert together["rewards"]["clipscore"] == pytest.approx(alone["rewards"]["clipscore"], rel=1e-3, abs=1e-5)
    assert together["spearman"] == pytest.approx(alone["spearman"])
    names = ("proxy_mean", "reward_best", "reward_worst", "loss", "grad_norm")
    ((found,), (expected,)) = (events(tmp_path / name, "iteration") for name in ("together", "alone"))
    assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-4)


@pytest.mark.parametrize(("recipe", "precision"), [("naive_scaling", "bf16"), ("naive_quant", "nvfp4")])
def test_training_uses_the_candidates(recipe: str, precision: str, backbone: PipelineBackbone, tmp_path: Path) -> None:
    config = config_of(recipe, tmp_path)
    rewards = RewardSet.load(["clipscore"], backbone)
    prompt = read_prompts(find_prompts("shapes"), "train")[0]
    source = DeviceSource(config, Loaded(backbone, rewards), Models.build(backbone, config), PromptSet(([prompt],)))
    summaries: list[ExplorationSummary] = []
    (group,) = source.explore(3, summaries.append)
    root = seed_root(config.seed, 3)
    selection = select(group, config.explore)
    kept = source.regenerate([selection])()
    assert kept is selection.samples
    (summary,) = summaries
    assert (summary.version, summary.precision, summary.score_count) == (3, precision, 12)
    assert summary.score_sum == pytest.approx(sum(group.scores))
    # Generate all in one batch, as before: in a different batch, an NVFP4 value may round to its neighbour.
    seeds = expand_seeds(root, prompt.id, config.explore.candidates)
    candidates = source.models.explorer.generate(prompt.text, seeds, steps=2).latents
    index = [seeds.index(seed) for seed in selection.seeds]
    assert torch.allclose(candidates[index], kept.latents, atol=1e-4)
    again = rewards.score(["clipscore"], kept.images, [prompt.text] * 4, [{}] * 4)["clipscore"]
    assert torch.allclose(again, kept.scores, atol=1e-4)
    assert best_worst(kept.scores, 4) == [0, 1, 2, 3]
