"""Fidelity at NVFP4 and FP8: generators, fitted steps, and plans on scores for which the right answer is known."""

import json

import pytest
import torch
from paper.experiments import RESULTS, fitted_plan
from plan_fidelity import AFTER, FITTED, STEPS, judge, state
from solrl_core.families import load_backbone
from solrl_core.sampling.generator import Generator
from solrl_engine.precision_check import generator_at
from support.precisions import REWARDS

SIZE, PROMPTS = 96, 3
TRUE = -torch.arange(1.0, SIZE + 1).expand(PROMPTS, len(REWARDS), SIZE)
"""Scores of candidates whose index is their rank, counted from 0."""


def test_a_plan_is_worse_by_the_ranks_that_its_own_images_lose() -> None:
    scores = {state("fp8", steps, until): TRUE for steps in (STEPS, FITTED) for until in (*AFTER[steps], steps)}
    # Selecting the candidate of true rank 61 instead of that of 1 makes the best 12 worse by 5 on average.
    swapped = TRUE.clone()
    swapped[:, 0, [0, 60]] = TRUE[:, 0, [60, 0]]
    rows = judge("mini-sana", "fp8", {"true": TRUE, **scores, state("fp8", FITTED, FITTED): swapped})
    worse = {(row["reward"], row["steps"]): row["worse"]["top"][0] for row in rows if row["after"] == row["steps"]}
    assert worse[REWARDS[0], FITTED] == pytest.approx(5)
    assert not any(value for key, value in worse.items() if key != (REWARDS[0], FITTED))


@pytest.mark.parametrize("model", ["mini-sana", "mini-sd3", "mini-flux"])
def test_fp8_on_a_cpu_is_emulated_and_closer_to_bf16_than_nvfp4(model: str) -> None:
    backbone = load_backbone(model)

    def latents(generator: Generator) -> torch.Tensor:
        return generator.generate("a red circle", range(8), steps=4, decode=False).latents

    generators = {precision: generator_at(backbone, precision) for precision in ("bf16", "fp8", "nvfp4")}
    assert (generators["fp8"].precision, generators["fp8"].numerics) == ("fp8", "emulated")
    base = latents(generators["bf16"])
    off = {precision: float((latents(generators[precision]) - base).norm() / base.norm()) for precision in generators}
    # mini-flux is little closer: its weights lie on NVFP4's grid, so that FP8 alone rounds them.
    assert 0.001 < off["fp8"] < 0.9 * off["nvfp4"]


def test_steps_fitted_to_another_solver_are_not_the_runs() -> None:
    stored = json.loads((RESULTS / "plan_fidelity.json").read_text())
    assert fitted_plan("mini-sana") == {"explore.fitted": stored["solvers"]["mini-sana"], "explore.steps": 4}
    assert stored["solver"]["mini-sd3"] == "dpm2"
    assert fitted_plan("mini-sd3") is None
