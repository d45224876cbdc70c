"""Seconds of a run's stages by the rates of a GPU, and the layouts of a run on several, with the seconds of each."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ConfigDict, ValidationError

from solrl_trainer.policy.update import trained_steps
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)

_WASTE = 0.15
"""Share of a run's time from which waiting is worth a change."""
_UNTIMED, _TIMED = 2, 3
"""Iterations at the start that do not count, because they compile, and the number whose median decides."""
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


@dataclass(frozen=True)
class GpuLayout:
    """Use of some GPUs.

    Attributes:
        serving: GPUs of the rollout service; 0: every GPU explores, regenerates and trains.
        training: GPUs of each run.
        runs: runs that share the service.
        share: share of the prompts that the service regenerates.
        explored: share of the prompts that the service explores.
        seconds: per prompt of one run.
        idle: share of the GPUs' time in which they wait.
    """

    serving: int
    training: int
    runs: int
    share: float
    explored: float
    seconds: float
    idle: float

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.serving + self.runs * self.training


def layouts(
    stages: Stages, prompts: int, gpus: int, *, serving: int | None = None, runs: int = 1, speed: float = 1.0
) -> list[GpuLayout]:
    """All layouts of `runs` equal runs on `gpus` GPUs, the fastest first.

    Args:
        stages: of one prompt on one training GPU.
        prompts: per iteration.
        gpus: of all runs and the service.
        serving: GPUs of the service; by default every number.
        runs: that share the GPUs.
        speed: of a serving GPU, relative to a training one.
    """
    found = [colocated(stages, prompts, gpus // runs)] if gpus >= runs and not serving else []
    for number in [serving] if serving else range(1, gpus):
        training = (gpus - number) // runs
        if training:
            found.append(served(stages, prompts, number, training, runs=runs, speed=speed))
    return sorted(found, key=lambda layout: layout.seconds)


def colocated(stages: Stages, prompts: int, gpus: int) -> GpuLayout:
    """Every GPU takes its prompts through all stages."""
    most = -(-prompts // gpus)
    seconds = most * stages.total / prompts
    return GpuLayout(0, gpus, 1, 0.0, 0.0, seconds, 1 - stages.total / (gpus * seconds))


def served(
    stages: Stages, prompts: int, serving: int, training: int, *, runs: int = 1, speed: float = 1.0
) -> GpuLayout:
    """A service explores ahead and regenerates a share of the prompts, while the runs' GPUs train on what has arrived.

    The shares are the best of those that whole prompts of a rank allow. A run's GPUs explore only if the service
    regenerates nothing. `serving` and `training` are GPUs of the service and of each run; the rest is as of `layouts`.
    """
    own = -(-prompts // training)
    found = []
    for count in range(1, 2 * own + 1):
        explored, regenerated = min(count, own), max(count - own, 0)
        there = (explored * stages.explore + regenerated * stages.regenerate) / own
        service = runs * prompts * there / (serving * speed)
        local = (own - explored) * stages.explore + (own - regenerated) * stages.regenerate
        # A rank waits for its first sample: of the service, unless it regenerates some itself meanwhile.
        first = max(stages.regenerate / speed - local, 0.0) if regenerated else 0.0
        iteration = max(service, local + first + own * stages.train)
        work = runs * prompts * (stages.total - (1 - 1 / speed) * there)
        idle = 1 - work / (iteration * (serving + runs * training))
        shares = regenerated / own, explored / own
        found.append(GpuLayout(serving, training, runs, *shares, iteration / prompts, idle))
    return min(found, key=lambda layout: layout.seconds)


def running_text(config: RunConfig, ranks: int, device: str) -> str:
    """The sides that explore, regenerate and train, in words; `device` is each rank's, as torch names it."""
    served = config.regenerate.at == "service"
    here = ["explore" if config.explore.source == "model" else "encode"] if config.explores_here else []
    here += ["regenerate"] if config.two_stage and not (served and config.regenerate.share == 1) else []
    units = ("GPU", "GPUs") if device.startswith("cuda") else ("CPU process", "CPU processes")
    here = [verb if ranks > 1 else f"{verb}s" for verb in (*here, "train")]
    text = f"{ranks} {units[ranks > 1]} {_listed(here)}"
    if config.uses_service:
        there = ["explores", "regenerates"] if served else ["explores"]
        text += f"; {config.service_url} {_listed(there)} (lag {config.lag})"
    return text


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def waste(shares: Sequence[float]) -> float | None:
    """Share of its time that a run wastes, if that is worth a change; `shares` are waited in each iteration."""
    if len(shares) < _UNTIMED + _TIMED:
        return None
    recent = median(shares[-_TIMED:])
    return recent if recent > _WASTE else None


def waste_text(config: RunConfig, share: float) -> str:
    """Advice to a run that waits this share of its time for the service."""
    served, optimizer = config.regenerate.at == "service", config.optimizer
    changes = []
    if config.lag == 0:
        changes.append("start a new run with explore.lag=1")
    if served and config.regenerate.share != "auto":
        changes.append("set regenerate.share=auto")
    elif config.explore.share != "auto":  # which takes over regenerating first
        changes.append("set explore.share=auto")
    if served and optimizer.steps == 1 and not optimizer.streamed:
        changes.append("set optimizer.streamed=true")
    changes.append("give the service more GPUs")
    own = ["rollout_url=null"]
    own += ["explore.lag=0"] if config.lag else []
    own += ["regenerate.at=trainer"] if served else []
    own += ["explore.share=1"] if config.explore.share != 1 else []
    own += ["regenerate.share=auto"] if config.regenerate.share not in ("auto", 1) else []
    changes.append(f"do without it by {' '.join(own)} (`solrl-train layout` compares)")
    *first, last = changes
    return f"this run waited {100 * share:.0f} % of its time for {config.service_url}: {', '.join(first)}, or {last}"


class WasteNote:
    """Says once what to change if a run waits too much."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._shares: list[float] = []
        self._said = False

    def iteration(self, share: float) -> None:
        """An iteration of the run waited this share of its time for the service."""
        self._shares.append(share)
        found = None if self._said else waste(self._shares)
        if found is not None:
            self._said = True
            logger.warning(waste_text(self._config, found))
