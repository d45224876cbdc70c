"""Short runs of the recipes that train on recorded trajectories, and explored by a service."""

from pathlib import Path

import pytest
import torch
from solrl_core.sampling.noise import initial_noise
from solrl_trainer.loop import Result, train
from tests.support.service_helpers import RunningService
from tests.support.small_model import small_model
from tests.trainer.real_runs import Watcher
from tests.trainer.training_helpers import TINY, events, iterations, run_config, same, state

RECIPES = ["flowgrpo", "flowgrpo_fast", "dancegrpo"]
SMALL = (
    *TINY,
    f"model={small_model()}",
    *("explore.prompts=2", "explore.candidates=6", "explore.keep=4", "iterations=2", "explore.precision=bf16"),
    *("evaluate.prompts=2", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.fidelity_prompts=1"),
)
TRAJECTORY = 6
"""Solver steps of a trained trajectory."""
TRAINED = {"flowgrpo": 5, "flowgrpo_fast": 2, "dancegrpo": 5}
"""Recipe → stochastic steps."""


def go(recipe: str, output: Path, *settings: str, url: str | None = None) -> Result:
    stages = (f"explore.steps={TRAJECTORY}", f"regenerate.steps={TRAJECTORY}", "explore.lag=0")
    overrides = (*SMALL, *stages, *settings)
    return train(run_config(f"mini-sana/{recipe}/clipscore", output, *overrides, rollout_url=url), Watcher())


@pytest.mark.parametrize(("recipe", "stages"), [*((recipe, "") for recipe in RECIPES), ("flowgrpo", "_two_stage")])
def test_a_recipe_trains_on_recorded_steps(recipe: str, stages: str, tmp_path: Path) -> None:
    samples = go(recipe + stages, tmp_path).samples
    assert not same(state(tmp_path, 2), state(tmp_path, 1))
    assert samples.recording.states.shape[:2] == (TRAINED[recipe] + 1, 8)
    figures = {"objective/ratio", "objective/clipped", "objective/old_kl", "objective/gap"}
    for line in iterations(tmp_path):
        assert {key for key in line if key.startswith("objective/")} - {"objective/kl"} == figures
        assert len(line["objective/gap"]) == TRAINED[recipe] or recipe == "dancegrpo"  # which draws levels
        assert all(0 <= gap < 1e-4 for gap in line["objective/gap"].values())
        assert ("objective/kl" in line) == (recipe == "flowgrpo")
        assert 0.9 < line["objective/ratio"] < 1.1
        # The first of two optimiser steps begins on the behaviour policy, the second does not.
        assert 0 < line["objective/clipped"] < 0.51
        assert line["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "settings"), [("flowgrpo_two_stage", ("explore.precision=nvfp4",)), ("dancegrpo_two_stage", ())]
)
def test_a_service_finds_seeds(
    recipe: str, settings: tuple[str, ...], small_service: RunningService, tmp_path: Path
) -> None:
    """Bit for bit as with local exploration; the regenerated trajectories begin at the explored candidates' noise."""
    local, served = tmp_path / "local", tmp_path / f"{recipe}-served"
    alone = go(recipe, local, *settings).samples
    samples = go(recipe, served, *settings, url=small_service.url).samples
    for ours, theirs in zip(alone.groups, samples.groups, strict=True):
        assert ours.seeds == theirs.seeds
        assert ours.scores == theirs.scores
    seeds = [seed for group in samples.groups for seed in group.seeds]
    assert torch.equal(samples.recording.states[0], initial_noise(seeds, samples.recording.states.shape[2:]))
    assert same(state(served, 2), state(local, 2))


def test_candidates_by_the_trained_steps_score_as_their_samples(tmp_path: Path) -> None:
    """In BF16, exploration takes the same trajectories; by the ODE they end elsewhere. The window moves."""
    settings = ("algorithm.window_order=progressive", "algorithm.window_within=1")
    for sampler in ("training", "ode"):
        output = tmp_path / sampler
        samples = go("flowgrpo_fast_two_stage", output, *settings, f"explore.sampler={sampler}").samples
        proxy = torch.tensor([group.scores for group in samples.groups])
        assert torch.allclose(proxy, samples.scores, atol=1e-5) == (sampler == "training")
        (measured,) = events(output, "fidelity")
        assert (measured["spearman"] > 0.999) == (sampler == "training")
