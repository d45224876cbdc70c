"""Seconds of a recipe's prompt on one H200 at the shape of a large model, from the parts in equal_gpus.json.

Parts were measured with 96 candidates, 24 kept samples and the noise levels of the model's preset, decoding and rewards
included. They are scaled by candidates, samples and pairs; the time of FP8 is linear in the steps, through the measured
six and four. A pass of the reference takes its share of training_phase.json.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from solrl_trainer.commands.layout import RATES, measuring
from solrl_trainer.policy.update import trained_steps
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve

RESULTS = Path(__file__).parents[1] / "results"
SHAPES = {"flux": "FLUX.1 512²", "sd3": "SD3.5-L 1024²", "sana": "SANA 1.6B 1024²"}
PRESETS = {"flux": "flux1", "sd3": "sd3", "sana": "sana"}
"""Shape → its model's name in presets."""
CANDIDATES, KEPT, STEPS = 96, 24, 10
PAIRS = {"flux": 4, "sd3": 6, "sana": 6}
"""Noise levels of a sample that the timed preset trains; a run that trains more is charged for these."""


@cache
def _parts(shape: str) -> dict[str, dict[str, Any]]:
    rows = json.loads((RESULTS / "equal_gpus.json").read_text())["rows"]
    return {row["part"]: row for row in rows if (row["model"], row["gpus"]) == (shape, 1)}


@cache
def _reference_share(shape: str) -> float:
    rows = json.loads((RESULTS / "training_phase.json").read_text())["rows"]
    passes = next(row for row in rows if (row["model"], row.get("way")) == (shape, "solrl"))
    return float(passes["reference"] / (passes["current"] + passes["old"] + passes["reference"]))


def seconds_of_prompt(config: RunConfig, shape: str) -> dict[str, float]:
    """Seconds to explore, regenerate and train one prompt of a run, by phase.

    Args:
        config: settings of a run of DiffusionNFT on the forward process.
        shape: one of `SHAPES`.
    """
    parts, explore = _parts(shape), config.explore
    full = parts["naive"]["explore"] / CANDIDATES / STEPS
    six, four = (parts[name]["explore"] / CANDIDATES for name in ("sol_rl", "sol_rl, 4 fitted steps"))
    cheap = six + (explore.steps - 6) * (six - four) / 2
    levels = min(trained_steps(config.sample_steps, config.algorithm.timestep_fraction), PAIRS[shape])
    pair = parts["training"]["s"] / KEPT / PAIRS[shape]
    if not config.algorithm.model_dump().get("kl_weight"):
        pair *= 1 - _reference_share(shape)
    sample = parts["sol_rl"]["regenerate"] / KEPT / STEPS * config.regenerate.steps
    return {
        "explore": explore.candidates * (full * explore.steps if explore.precision == "bf16" else cheap),
        "regenerate": explore.keep * sample if config.two_stage else 0.0,
        "train": explore.keep * levels * pair,
    }


def fast_run(shape: str) -> RunConfig:
    """Settings of the preset `fast`, exploring in FP8, as on an H200."""
    return resolve(f"{PRESETS[shape]}/fast/imagereward", overrides=["explore.precision=fp8"]).config


def hours_of_run(config: RunConfig, shape: str) -> float:
    """Hours of a run on one GPU with its evaluations and measurements of rank fidelity, as `layout` computes them."""
    judged = measuring(config, RATES[PRESETS[shape]])
    return (config.iterations * seconds_of_iteration(config, shape) + judged) / 3600


def seconds_of_iteration(config: RunConfig, shape: str) -> float:
    """Seconds of all prompts of an iteration."""
    return config.explore.prompts * sum(seconds_of_prompt(config, shape).values())
