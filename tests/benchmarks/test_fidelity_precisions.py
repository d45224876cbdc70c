"""Benchmarks of fidelity at NVFP4 and FP8: generators, solvers and the shared table."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_core.families import load_backbone
from solrl_core.sampling.generator import Generator
from solrl_engine.precision_check import generator_at

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


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
    from paper.experiments import fitted_plan

    stored: dict[str, Any] = json.loads((RESULTS / "plan_fidelity.json").read_text())
    assert fitted_plan("mini-sana") == {"explore.fitted": stored["solvers"]["mini-sana"], "explore.steps": 4}
    assert stored["solver"]["mini-sd3"] == "dpm2"
    assert fitted_plan("mini-sd3") is None
