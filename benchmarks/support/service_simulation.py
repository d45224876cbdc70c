"""Discrete-event simulation of runs that share a rollout service: its real queue, with measured seconds of work."""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from solrl_rollout.engine.queue.fair_queue import FairQueue, Quantum
from solrl_trainer.layouts.layouts import Stages

CHUNKS = 4
"""Chunks of a group of 96 candidates; a group's 24 samples are one."""
_IN_FLIGHT = 4
"""Regenerations that a run has requested and not received."""
_TURN = 4
_COST = 10_000
"""Cost of a second."""
_MERGE = 0.1
"""Seconds to merge another adapter version into a generator."""
_ITERATIONS = 24
"""Iterations of each run."""


class Event:
    """Something that happens once, for which processes wait."""

    def __init__(self) -> None:
        self.happened = False
        self.then: list[Callable[[], None]] = []

    def happen(self) -> None:
        """Let the waiting processes go on."""
        self.happened = True
        for each in self.then:
            each()


Process = Iterator[float | Event]
"""Yields seconds that it takes, and events that it waits for."""


class Clock:
    """Virtual time, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (self.now + seconds, next(self._order), then))

    def begin(self, process: Process) -> None:

        def go_on() -> None:
            for wait in process:
                if not isinstance(wait, Event):
                    return self.after(wait, go_on)
                if not wait.happened:
                    return wait.then.append(go_on)

        go_on()

    def run(self, until: Callable[[], bool]) -> None:
        """Let everything happen until something is so."""
        while self._coming and not until():
            self.now, _, then = heapq.heappop(self._coming)
            then()


@dataclass(frozen=True, eq=False)
class Work:
    """A chunk of a run.

    Attributes:
        run: its run, whose adapter a worker merges.
        version: of the adapter.
        seconds: on a serving GPU.
        ahead: nobody waits for it.
        done: happens when it is finished.
    """

    run: int
    version: int
    seconds: float
    ahead: bool
    done: Event = field(default_factory=Event)
    tenant: str = "tenant"
    job: str = ""
    candidates: int = 1

    @property
    def cost(self) -> int:
        """Seconds, as the queue counts them."""
        return max(1, round(self.seconds * _COST))


class Service:
    """Workers on one fair queue."""

    def __init__(self, clock: Clock, workers: int) -> None:
        self._clock = clock
        self._queue: Any = FairQueue(10**9, turn=_TURN)
        self._turns = [Quantum(keeps_run=workers > 1) for _ in range(workers)]
        self._merged: list[tuple[int, int] | None] = [None] * workers
        self._free = set(range(workers))
        self.seconds: dict[int, float] = defaultdict(float)
        """Seconds of work by run."""

    def put(self, work: Sequence[Work]) -> None:
        self._queue.put(work)
        for worker in sorted(self._free):
            self._begin(worker)

    def _begin(self, worker: int) -> None:
        work: Work | None = self._queue.take(self._turns[worker])
        if work is None:
            self._free.add(worker)
            return
        self._free.discard(worker)
        other = self._merged[worker] != (work.run, work.version)
        self._merged[worker] = (work.run, work.version)
        self.seconds[work.run] += work.seconds

        def end() -> None:
            self._begin(worker)
            work.done.happen()

        self._clock.after(work.seconds + _MERGE * other, end)


@dataclass
class Run:
    """A training run on one GPU at a service: explores one version behind, and trains on samples as they arrive.

    Attributes:
        number: its number.
        clock, service: where it runs.
        stages: seconds of one prompt on the run's GPU.
        prompts: per iteration.
        share: share of them that the service regenerates.
        explored: share of them that it explores.
        push: seconds from the last gradient to the next version at the service.
        speed: of a serving GPU, relative to a training one.
        ended: time at which each iteration ended.
    """

    number: int
    clock: Clock
    service: Service
    stages: Stages
    prompts: int
    share: float
    explored: float
    push: float
    speed: float
    ended: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._explored: dict[tuple[int, int], Event] = defaultdict(Event)
        self._arrived: dict[tuple[int, int], Event] = defaultdict(Event)
        self._here = self.prompts - round(self.prompts * self.explored)
        """Number of prompts that it explores itself."""

    def train(self) -> Process:
        local = self.prompts - round(self.prompts * self.share)
        self._explore(0)
        for iteration in range(_ITERATIONS):
            self._explore(iteration + 1)
            # Its share of the next iteration, and of the first before that.
            coming = [one for one in ([iteration + 1] if iteration else [0, 1]) if one < _ITERATIONS]
            for key in itertools.product(coming, range(self._here)):
                self._explored[key].happen()
            yield len(coming) * self._here * self.stages.explore
            waiting = iter(range(local, self.prompts))
            for _ in range(_IN_FLIGHT):
                self.clock.begin(self._regenerate(iteration, waiting))
            for prompt in range(self.prompts):
                yield (self._explored if prompt < local else self._arrived)[iteration, prompt]
                yield (self.stages.regenerate if prompt < local else 0.0) + self.stages.train
            yield self.push
            self.ended.append(self.clock.now)

    def _explore(self, iteration: int) -> None:
        """Queue the exploration of an iteration, under the version before it."""
        version, seconds = max(0, iteration - 1), self.stages.explore / CHUNKS / self.speed
        for prompt in range(self._here, self.prompts) if iteration < _ITERATIONS else ():
            chunks = [Work(self.number, version, seconds, iteration > 0) for _ in range(CHUNKS)]
            self.clock.begin(self._whole(chunks, self._explored[iteration, prompt]))
            self.service.put(chunks)

    def _whole(self, chunks: Sequence[Work], explored: Event) -> Process:
        """Wait for the chunks of a prompt."""
        yield from (one.done for one in chunks)
        explored.happen()

    def _regenerate(self, iteration: int, waiting: Iterator[int]) -> Process:
        """Have the service regenerate one waiting prompt after the other, each once it is explored."""
        for prompt in waiting:
            yield self._explored[iteration, prompt]
            work = Work(self.number, iteration, self.stages.regenerate / self.speed, False)
            self.service.put([work])
            yield work.done
            self._arrived[iteration, prompt].happen()


def simulate(
    stages: Stages,
    *,
    prompts: int,
    serving: int,
    runs: int,
    share: float,
    explored: float,
    push: float,
    speed: float,
) -> tuple[float, list[float]]:
    """Simulate equal runs that begin one after the other; `serving` is the number of the service's GPUs.

    The other arguments are those of `Run`.

    Returns:
        Seconds per prompt of all runs together, while all train and after each one's second iteration; and the share of
        the service's work by run in that time.
    """
    clock = Clock()
    service = Service(clock, serving)
    every = [Run(number, clock, service, stages, prompts, share, explored, push, speed) for number in range(runs)]
    for run in every:
        clock.after(run.number * stages.total * prompts / runs, lambda run=run: clock.begin(run.train()))
    clock.run(until=lambda: all(len(run.ended) >= 2 for run in every))
    begin, before = clock.now, dict(service.seconds)
    clock.run(until=lambda: any(len(run.ended) == _ITERATIONS for run in every))
    end, work = clock.now, [service.seconds[run] - before[run] for run in range(runs)]
    done = [_iterations_at(run.ended, end) - _iterations_at(run.ended, begin) for run in every]
    each = [(end - begin) / iterations / prompts for iterations in done]
    return 1 / sum(1 / seconds for seconds in each), [seconds / sum(work) for seconds in work]


def _iterations_at(ended: Sequence[float], time: float) -> float:
    """Number of iterations that had ended, with the part of the one in progress, which takes as long as the last."""
    number = sum(end <= time for end in ended)
    began = ended[number - 1]
    length = ended[number] - began if number < len(ended) else began - ended[number - 2]
    return number + (time - began) / length
