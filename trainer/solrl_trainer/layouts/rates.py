"""Rates of a GPU for a model: what a run's stages are computed from."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from solrl_trainer.policy.update import trained_steps
from solrl_trainer.settings.config import RunConfig

SHIPPED = "rates.json"
"""Model of the presets → its GPU and rates: of training by `benchmarks/true_run.py`, all others by `equal_gpus.py`."""


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


class MeasuredRates(BaseModel):
    """Rates of a model on a GPU, as in a file.

    Attributes:
        gpu: name of the GPU.
        model: a run's `model`.
        rates: of this model on that GPU.
    """

    model_config = ConfigDict(extra="forbid")

    gpu: str
    model: str
    rates: Rates

    def save(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "MeasuredRates":
        """Read a file that `save` wrote.

        Raises:
            ValueError, OSError: the file is missing, or another kind of file.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"])) or "the file"
            raise ValueError(
                f"got {path}, in which {where} is wrong: {error.errors()[0]['msg']}; expected a file that "
                "`solrl-train layout --measure --rates FILE` wrote"
            ) from None


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
    """Rates from the seconds of three groups. None is negative, however much the times scatter.

    Args:
        candidates: of each group.
        explored: steps and seconds of two groups at the exploring precision, with different numbers of steps.
        naive: steps and seconds of a group in BF16.
        point: training one sample at one timestep.
    """
    (more, slow), (fewer, fast) = explored
    fp8 = max((slow - fast) / (more - fewer) / candidates, 0.0)
    image = max(slow / candidates - more * fp8, 0.0)
    bf16 = max((naive[1] / candidates - image) / naive[0], 0.0)
    return Rates(bf16=bf16, fp8=fp8, image=image, point=point)


def shipped_rates(model: str) -> MeasuredRates | None:
    """Rates of a preset's model; None if none were measured."""
    every = json.loads(files("solrl_trainer.layouts").joinpath(SHIPPED).read_text(encoding="utf-8"))
    return MeasuredRates.model_validate(every[model]) if model in every else None


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
        train=explore.keep * points * rates.point,
    )
