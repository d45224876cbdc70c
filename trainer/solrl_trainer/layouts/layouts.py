"""Layouts of a run on some GPUs, and the seconds that each takes per prompt."""

from collections.abc import Iterator
from dataclasses import dataclass

from solrl_trainer.layouts.rates import Stages


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


def colocated(stages: Stages, prompts: int, gpus: int) -> GpuLayout:
    """Every GPU takes its prompts through all stages.

    Args:
        stages: of one prompt on one GPU.
        prompts: per iteration.
        gpus: of the run.
    """
    most = -(-prompts // gpus)
    seconds = most * stages.total / prompts
    return GpuLayout(0, gpus, 1, 0.0, 0.0, seconds, 1 - stages.total / (gpus * seconds))


def served(
    stages: Stages, prompts: int, serving: int, training: int, *, runs: int = 1, speed: float = 1.0
) -> GpuLayout:
    """A service explores ahead and regenerates a share of the prompts, while the runs' GPUs train on what has arrived.

    The shares are the best of those that whole prompts of a rank allow. A run's GPUs explore only if the service
    regenerates nothing.

    Args:
        stages: of one prompt on one training GPU.
        prompts: per iteration.
        serving: GPUs of the service.
        training: GPUs of each run.
        runs: runs that share the service.
        speed: of a serving GPU, relative to a training one.
    """
    own = -(-prompts // training)
    best: GpuLayout | None = None
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
        layout = GpuLayout(serving, training, runs, regenerated / own, explored / own, iteration / prompts, idle)
        if best is None or layout.seconds < best.seconds:
            best = layout
    assert best is not None
    return best


def layouts(
    stages: Stages, prompts: int, gpus: int, *, serving: int | None = None, runs: int = 1, speed: float = 1.0
) -> Iterator[GpuLayout]:
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
    yield from sorted(found, key=lambda layout: layout.seconds)
