"""Seconds of a recipe's prompt on one H200 at the shape of a large model, by the rates of `solrl-train layout`.

Rates are of equal_gpus.json, decoding and rewards included.
"""

from pathlib import Path

from solrl_trainer.commands.layout import RATES, measuring, stages
from solrl_trainer.policy.update import trained_steps
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve

RESULTS = Path(__file__).parents[1] / "results"
SHAPES = {"flux": "FLUX.1 512²", "sd3": "SD3.5-L 1024²", "sana": "SANA 1.6B 1024²"}
PRESETS = {"flux": "flux1", "sd3": "sd3", "sana": "sana"}
"""Shape → its model's name in presets."""
PAIRS = {"flux": 4, "sd3": 6, "sana": 6}
"""Noise levels of a sample that the timed preset trains; a run that trains more is charged for these."""


def seconds_of_prompt(config: RunConfig, shape: str) -> dict[str, float]:
    """Seconds to explore, regenerate and train one prompt of a run, by phase.

    Args:
        config: settings of a run of DiffusionNFT on the forward process.
        shape: one of `SHAPES`.
    """
    phases = vars(stages(config, RATES[PRESETS[shape]]))
    levels = trained_steps(config.sample_steps, config.algorithm.timestep_fraction)
    return phases | {"train": phases["train"] * min(1, PAIRS[shape] / levels)}


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
