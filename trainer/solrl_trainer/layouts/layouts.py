"""Seconds of a run's stages by the rates of a GPU, and the layouts of a run on several, with the seconds of each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from solrl_trainer.policy.update import trained_steps
from solrl_trainer.settings.config import RunConfig

SHIPPED = "rates.json"
"""Model of the presets → its GPU and rates: of training by `benchmarks/true_run.py`, of the reference by
`training_phase.py`, all others by `equal_gpus.py`."""

PEAKS: Mapping[str, tuple[float, float]] = {
    "A100": (312, 0),
    "H100": (989, 1979),
    "H200": (989, 1979),
    "L40S": (362, 733),
    "RTX 3090": (71, 0),
    "RTX 4090": (165, 330),
}
"""GPU → dense TFLOPS in BF16 and FP8 that sum in float32, by NVIDIA's data sheets (A100, H100: SXM); 0 without FP8."""


@dataclass(frozen=True)
class Rates:
    """Seconds on one GPU.

    Attributes:
        bf16, fp8: a solver step of one candidate.
        image: decoding and scoring one candidate.
        point: training one sample at one timestep.
        reference: of `point`, the pass of the reference, which a run without a pull to it omits.
    """

    bf16: float
    fp8: float
    image: float
    point: float
    reference: float = 0.0


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
                f"got {path}, where {where} is wrong: {error.errors()[0]['msg']}; expected a file that "
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


def scaled_rates(rates: Rates, gpu: str) -> Rates:
    """Rates that another GPU of `PEAKS` would have if an H200's follow the peaks; it explores in BF16 without FP8."""
    (bf16, fp8), (of_bf16, of_fp8) = PEAKS["H200"], PEAKS[gpu]
    slower = bf16 / of_bf16
    return Rates(
        bf16=rates.bf16 * slower,
        fp8=rates.fp8 * fp8 / of_fp8 if of_fp8 else rates.bf16 * slower,
        image=rates.image * slower,
        point=rates.point * slower,
        reference=rates.reference * slower,
    )


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
    point = rates.point - (0 if config.algorithm.model_dump().get("kl_weight") else rates.reference)
    points = trained_steps(samples.steps, config.algorithm.timestep_fraction)
    return Stages(
        explore=steps * step + images * rates.image,
        regenerate=regenerated * (samples.steps * rates.bf16 + rates.image),
        train=explore.keep * points * point,
    )


@dataclass(frozen=True)
class GpuLayout:
    """Use of some GPUs.

    Attributes:
        serving: GPUs of the rollout service; 0: every GPU explores, regenerates and trains.
        training: GPUs of each run.
        runs: runs that share the service.
        share: share of the prompts that the service explores, `explore.share`; 0 without a service.
        seconds: per prompt of one run.
        idle: share of the GPUs' time in which they wait.
    """

    serving: int
    training: int
    runs: int
    share: float
    seconds: float
    idle: float

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.serving + self.runs * self.training


def layouts(stages: Stages, prompts: int, gpus: int, *, runs: int = 1, speed: float = 1.0) -> list[GpuLayout]:
    """All layouts of `runs` equal runs on `gpus` GPUs, the fastest first.

    Args:
        stages: of one prompt on one training GPU.
        prompts: per iteration.
        gpus: of all runs and the service.
        runs: that share the GPUs.
        speed: of a serving GPU, relative to a training one.
    """
    every = [colocated(stages, prompts, gpus // runs)] if gpus >= runs else []
    for serving in range(1, gpus):
        if training := (gpus - serving) // runs:
            every.append(served(stages, prompts, serving, training, runs=runs, speed=speed))
    return sorted(every, key=lambda layout: layout.seconds)


def colocated(stages: Stages, prompts: int, gpus: int) -> GpuLayout:
    """Every GPU takes its prompts through all stages."""
    seconds = -(-prompts // gpus) * stages.total / prompts
    return GpuLayout(0, gpus, 1, 0.0, seconds, 1 - stages.total / (gpus * seconds))


def served(
    stages: Stages, prompts: int, serving: int, training: int, *, runs: int = 1, speed: float = 1.0
) -> GpuLayout:
    """A service explores one version ahead, and the runs' GPUs do the rest; the slower side sets the pace.

    The share that the service explores is the best of those that whole prompts of a rank allow. `serving` and
    `training` are GPUs of the service and of each run; the rest is as of `layouts`.
    """
    per_rank = -(-prompts // training)

    def with_share(share: float) -> GpuLayout:
        explored = share * stages.explore
        iteration = max(runs * prompts * explored / (serving * speed), per_rank * (stages.total - explored))
        work = runs * prompts * (stages.total - (1 - 1 / speed) * explored)
        idle = 1 - work / (iteration * (serving + runs * training))
        return GpuLayout(serving, training, runs, share, iteration / prompts, idle)

    return min((with_share(count / per_rank) for count in range(1, per_rank + 1)), key=lambda layout: layout.seconds)
