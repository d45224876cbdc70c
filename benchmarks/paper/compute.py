"""Compute of a run: passes of the transformer for one sample, weighted by their times at the shape of a large model.

Times are those measured on an H200 at true shapes with random weights, in benchmarks/results: generation from
step_time.json, training from training_phase.json. No H200 multiplies in NVFP4, so a pass in NVFP4 costs as one in FP8.
Decoding, rewards and evaluations are not counted. The costs are stored beside the finished runs, because they decide
how many iterations each run gets: later measurements do not change them.
"""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from solrl_trainer.algorithms.grpo import GrpoSettings
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.policy.update import trained_steps
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve

from paper.experiments import RESULTS

SHAPES = {"flux": "FLUX.1 512²", "sd3": "SD3.5-L 1024²", "sana": "SANA 1.6B 1024²"}
PRESETS = {"flux": "flux1", "sd3": "sd3", "sana": "sana"}
SOURCES = ("step_time.json", "training_phase.json")
SHAPE = "flux"
"""Large model at whose shape runs of different algorithms have equal compute."""
STORED = Path("paper/costs.json")
"""Costs of the stored runs, in the folder of the results. Delete it and the runs to begin with new measurements."""
Passes = Counter[str]
"""Passes of one sample: "generate bf16", "generate nvfp4", "train current" (forward and backward), "train old" and
"train reference" (forward)."""


def passes_of_iteration(config: RunConfig, fraction: float | None = None) -> Passes:
    """Passes of one iteration of a run, as the stored runs made them: the behaviour policy's at every optimiser step.

    Args:
        config: settings of the run.
        fraction: share of the noise levels that are trained, by default the run's own.

    Raises:
        ValueError: classifier-free guidance, which is not counted.
    """
    if config.guidance != 1:
        raise ValueError(f"got guidance {config.guidance:g}; expected 1: passes of guidance are not counted")
    explore, prompts = config.explore, config.explore.prompts
    passes: Passes = Counter({f"generate {explore.precision}": prompts * explore.candidates * explore.steps})
    if config.two_stage:
        passes["generate bf16"] += prompts * explore.keep * config.regenerate.steps
    algorithm = ALGORITHMS.find(config.algorithm.name)(config.algorithm)
    trained = algorithm.units(torch.zeros(config.explore.keep), config.explore.keep).numel() * prompts
    levels = trained_steps(_steps(config), fraction or config.algorithm.timestep_fraction)
    points = trained * levels
    for policy in ("current", *algorithm.fixed):
        passes[f"train {policy}"] += points
    return passes


def preset_fraction(shape: str, recipe: str = "sol_rl") -> float:
    """Share of the noise levels that the large model's preset of a recipe trains."""
    algorithm = resolve(f"{PRESETS[shape]}/{recipe}/clipscore").config.algorithm
    return algorithm.timestep_fraction


def _steps(config: RunConfig) -> int:
    """Steps of the sampler at which a sample can be trained."""
    steps = config.regenerate.steps if config.two_stage else config.explore.steps
    if isinstance(config.algorithm, GrpoSettings):
        return min(config.algorithm.window or steps, steps - 1)
    data = ALGORITHMS.find(config.algorithm.name)(config.algorithm).trains_on
    no_samples = cast(TrainingSamples, None)  # the noise levels of the forward process do not depend on them
    return len(data.sigmas(no_samples, range(config.regenerate.steps + 1))) - 1


@cache
def costs_of(shape: str, results: Path = RESULTS) -> dict[str, Any]:
    """Costs at the shape of a large model: `device` of the measurement, and `ms` of a pass of one sample by its name.

    Those of the stored runs, or else from the benchmarks' stored results.

    Raises:
        KeyError, FileNotFoundError: the results lack a measurement.
    """
    stored = results / STORED
    found: dict[str, Any] = json.loads(stored.read_text())[shape] if stored.is_file() else _measured(shape, results)
    return found


def store_costs(out: Path, results: Path = RESULTS) -> None:
    """Write the costs of all shapes to the archive's folder in `out`."""
    (out / STORED).parent.mkdir(parents=True, exist_ok=True)
    (out / STORED).write_text(json.dumps({shape: costs_of(shape, results) for shape in SHAPES}, indent=1) + "\n")


def _measured(shape: str, results: Path) -> dict[str, Any]:
    steps, training = (json.loads((results / name).read_text())["rows"] for name in SOURCES)
    tiers = {row["tier"]: row for row in steps if row["model"] == shape and "ms" in row}
    rows = [row for row in training if row["model"] == shape and row["kind"] == "way" and row["way"] == "solrl"]
    if not rows:
        raise KeyError(f"{SOURCES[1]} has no row of solrl for {shape!r}: measure it by training_phase.py")
    train = rows[0]
    ms = {f"generate {tier}": tiers[tier]["ms"] / tiers[tier]["batch"] for tier in ("bf16", "fp8")}
    ms["generate nvfp4"] = ms["generate fp8"]
    ms |= {f"train {policy}": train[policy] / train["batch"] for policy in ("current", "old", "reference")}
    return {"device": train["device"], "ms": ms}


def seconds_by_pass(config: RunConfig, shape: str = SHAPE, fraction: float | None = None) -> dict[str, float]:
    """Time of one iteration of a run at the shape of a large model by pass; `fraction` as in `passes_of_iteration`."""
    ms = costs_of(shape)["ms"]
    return {name: count * ms[name] / 1000 for name, count in passes_of_iteration(config, fraction).items()}


def seconds_of(config: RunConfig, shape: str = SHAPE, fraction: float | None = None) -> float:
    """Time of one iteration of a run at the shape of a large model; `fraction` as in `passes_of_iteration`."""
    return sum(seconds_by_pass(config, shape, fraction).values())
