"""Rates of a GPU for a model: what a run's stages are computed from."""

import json
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from solrl_trainer.policy.update import trained_steps
from solrl_trainer.settings.config import RunConfig

SHIPPED = "rates.json"
"""Measured by `benchmarks/equal_gpus.py`: GPU → model of the presets → rates."""


@dataclass(frozen=True)
class Rates:
    """Seconds on one GPU.

    Attributes:
        bf16, fp8: a solver step of one candidate.
        image: decoding and scoring one candidate.
        point: training one sample at one timestep.
    """

    bf16: float
    fp8: float
    image: float
    point: float

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Rates":
        """Rates from JSON."""
        return cls(*(float(values[field.name]) for field in fields(cls)))


@dataclass(frozen=True)
class Stages:
    """Seconds that the stages of one prompt take on one GPU."""

    explore: float
    regenerate: float
    train: float

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return self.explore + self.regenerate + self.train


def fit_rates(
    candidates: int, explored: tuple[tuple[int, float], tuple[int, float]], naive: tuple[int, float], point: float
) -> Rates:
    """Rates from the seconds of three groups.

    Args:
        candidates: of each group.
        explored: steps and seconds of two groups at the exploring precision, with different numbers of steps.
        naive: steps and seconds of a group in BF16.
        point: training one sample at one timestep.
    """
    (more, slow), (fewer, fast) = explored
    fp8 = (slow - fast) / (more - fewer) / candidates
    image = slow / candidates - more * fp8
    return Rates(bf16=(naive[1] / candidates - image) / naive[0], fp8=fp8, image=image, point=point)


def shipped_rates(model: str) -> dict[str, Rates]:
    """GPU → rates of a preset's model; empty if none were measured."""
    every = json.loads(files("solrl_trainer.layouts").joinpath(SHIPPED).read_text(encoding="utf-8"))
    return {gpu: Rates.of(models[model]) for gpu, models in every.items() if model in models}


def stages(config: RunConfig, rates: Rates) -> Stages:
    """Seconds of one prompt with a run's settings."""
    explore, samples = config.explore, config.regenerate
    step = rates.bf16 if explore.precision == "bf16" or not config.two_stage else rates.fp8
    steps, images = explore.candidates * explore.steps, explore.candidates
    if explore.prune is not None:
        dropped = explore.candidates - explore.prune.keep
        steps -= dropped * (explore.steps - explore.prune.after)
        images += explore.prune.keep  # candidates are scored halfway, and the rest again
    regenerated = explore.keep if config.two_stage else 0
    points = trained_steps(samples.steps, config.algorithm.timestep_fraction) * config.optimizer.epochs
    return Stages(
        explore=steps * step + images * rates.image,
        regenerate=regenerated * (samples.steps * rates.bf16 + rates.image),
        train=(samples.keep or explore.keep) * points * rates.point,
    )
