"""Discrete-event simulation of runs that share a rollout service: its real queue, with measured seconds of work."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, cast

from solrl_rollout.engine.queue.fair_queue import FairQueue, Quantum
from solrl_trainer.layouts.rates import Stages

CHUNKS = 4
"""Chunks of a group of 96 candidates; a group's 24 samples are one."""
_IN_FLIGHT = 4
"""Regenerations that a rank has requested and not received."""
_TURN = 4
_COST = 10_000
"""Cost of a second."""
_MERGE = 0.1
"""Seconds to merge another adapter version into a generator."""
_ITERATIONS = 24
"""Iterations of each run."""


@dataclass(frozen=True, eq=False)
class Work:
    """A chunk of a run.

    Attributes:
        run: its run, whose adapter a worker merges.
        version: of the adapter.
        seconds: on a serving GPU.
        ahead: nobody waits for it.
        done: called when it is finished.
    """

    run: int
    version: int
    seconds: float
    ahead: bool
    done: Callable[[], None]
    tenant: str = "tenant"
    job: str = ""
    candidates: int = 1

    @property
    def cost(self) -> int:
        """Seconds, as the queue counts them."""
        return max(1, round(self.seconds * _COST))


class Clock:
    """Virtual time, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have something happen in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def run(self, until: Callable[[], bool]) -> None:
        """Let everything happen until something is so."""
        while self._events and not until():
            self.now, _, event = heapq.heappop(self._events)
            event()


class Service:
    """Workers on one fair queue."""

    def __init__(self, clock: Clock, workers: int) -> None:
        self._clock = clock
        self._queue = FairQueue(10**9, turn=_TURN)
        self._turns = [Quantum(keeps_run=workers > 1) for _ in range(workers)]
        self._merged: list[tuple[int, int] | None] = [None] * workers
        self._free = set(range(workers))
        self.seconds: dict[int, float] = {}
        """Seconds of work by run."""

    def put(self, work: Sequence[Work]) -> None:
        """Queue chunks."""
        self._queue.put(cast(Any, work))
        for worker in sorted(self._free):
            self._begin(worker)

    def _begin(self, worker: int) -> None:
        work: Any = self._queue.take(self._turns[worker])
        if work is None:
            self._free.add(worker)
            return
        self._free.discard(worker)
        other = self._merged[worker] != (work.run, work.version)
        self._merged[worker] = (work.run, work.version)
        self.seconds[work.run] = self.seconds.get(work.run, 0.0) + work.seconds
        self._clock.after(work.seconds + _MERGE * other, lambda: self._end(worker, work))

    def _end(self, worker: int, work: Work) -> None:
        self._begin(worker)
        work.done()


@dataclass
class Run:
    """A training run at a service: explores one version behind, and trains on samples as they arrive.

    Attributes:
        number: its number.
        clock, service: where it runs.
        stages: seconds of one prompt on one GPU of the trainer.
        prompts: per iteration.
        ranks: its GPUs.
        share: share of each rank's prompts that the service regenerates.
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
    ranks: int
    share: float
    explored: float
    push: float
    speed: float
    ended: list[float] = field(default_factory=list)
    _explored: set[tuple[int, int]] = field(default_factory=set)
    _arrived: set[tuple[int, int]] = field(default_factory=set)
    _waits: dict[tuple[str, int, int], Callable[[], None]] = field(default_factory=dict)
    _training: int = 0

    def start(self) -> None:
        """Begin the first iteration."""
        self._explore(0)
        self._begin(0)

    def _explore(self, iteration: int) -> None:
        """Queue the exploration of an iteration, under the version before it."""
        if iteration >= _ITERATIONS:
            return
        version, seconds = max(0, iteration - 1), self.stages.explore / CHUNKS / self.speed
        for prompt in (prompt for own in self._own() for prompt in own[self._here(own) :]):
            left = [CHUNKS]

            def done(prompt: int = prompt, left: list[int] = left) -> None:
                left[0] -= 1
                if not left[0]:
                    self._explored.add((iteration, prompt))
                    self._wake("explored", iteration, prompt)

            self.service.put([Work(self.number, version, seconds, iteration > 0, done) for _ in range(CHUNKS)])

    def _own(self) -> list[list[int]]:
        """Prompts of each rank."""
        size = -(-self.prompts // self.ranks)
        return [list(range(rank * size, min(self.prompts, (rank + 1) * size))) for rank in range(self.ranks)]

    def _here(self, own: list[int]) -> int:
        """Number of a rank's prompts that it explores itself."""
        return len(own) - round(len(own) * self.explored)

    def _begin(self, iteration: int) -> None:
        """Begin an iteration: each rank explores its share of the next one, and of the first before that."""
        self._explore(iteration + 1)
        self._training = self.ranks
        coming = [one for one in ([iteration + 1] if iteration else [0, 1]) if one < _ITERATIONS]
        for own in self._own():
            here = own[: self._here(own)]
            self._explored.update(product(coming, here))
            seconds = len(coming) * len(here) * self.stages.explore
            self.clock.after(seconds, partial(self._begin_rank, iteration, own))

    def _begin_rank(self, iteration: int, own: list[int]) -> None:
        """Regenerate and train a rank's prompts."""
        local = len(own) - round(len(own) * self.share)
        waiting = own[local:]
        for _ in range(_IN_FLIGHT):
            self._request(iteration, waiting)
        self._train(iteration, own, local)

    def _request(self, iteration: int, waiting: list[int]) -> None:
        """Have the service regenerate the rank's next prompt once it is explored."""
        if not waiting:
            return
        prompt, seconds = waiting.pop(0), self.stages.regenerate / self.speed

        def done() -> None:
            self._arrived.add((iteration, prompt))
            self._wake("arrived", iteration, prompt)
            self._request(iteration, waiting)

        work = Work(self.number, iteration, seconds, False, done)
        self._when("explored", iteration, prompt, lambda: self.service.put([work]))

    def _train(self, iteration: int, own: list[int], local: int) -> None:
        """Train on a rank's prompts in their order; of the first `local`, make the samples here."""
        if not own:
            self._training -= 1
            if not self._training:
                self.clock.after(self.push, lambda: self._end(iteration))
            return
        prompt, *others = own
        state, seconds = ("explored", self.stages.regenerate) if local > 0 else ("arrived", 0.0)

        def begin() -> None:
            self.clock.after(seconds + self.stages.train, lambda: self._train(iteration, others, local - 1))

        self._when(state, iteration, prompt, begin)

    def _end(self, iteration: int) -> None:
        self.ended.append(self.clock.now)
        if iteration + 1 < _ITERATIONS:
            self._begin(iteration + 1)

    def _when(self, state: str, iteration: int, prompt: int, event: Callable[[], None]) -> None:
        done = self._explored if state == "explored" else self._arrived
        if (iteration, prompt) in done:
            event()
        else:
            self._waits[state, iteration, prompt] = event

    def _wake(self, state: str, iteration: int, prompt: int) -> None:
        if (event := self._waits.pop((state, iteration, prompt), None)) is not None:
            event()


@dataclass(frozen=True)
class Outcome:
    """Outcome of a simulation.

    Attributes:
        seconds: per prompt of each run, while all train and after each one's second iteration.
        shares: share of the service's work by run in that time.
    """

    seconds: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def together(self) -> float:
        """Seconds per prompt of all runs together."""
        return 1 / sum(1 / seconds for seconds in self.seconds)


def simulate(
    stages: Stages,
    *,
    prompts: int,
    serving: int,
    training: int,
    runs: int,
    share: float,
    explored: float = 1.0,
    push: float = 1.0,
    speed: float = 1.0,
) -> Outcome:
    """Simulate equal runs that begin one after the other.

    Args:
        stages: seconds of one prompt on one training GPU.
        prompts: per iteration.
        serving: GPUs of the service.
        training: GPUs of each run.
        runs: number of runs.
        share: share of the prompts that the service regenerates.
        explored: share of the prompts that the service explores.
        push: seconds from the last gradient to the next version at the service.
        speed: of a serving GPU, relative to a training one.
    """
    clock = Clock()
    service = Service(clock, serving)
    every = [
        Run(number, clock, service, stages, prompts, training, share, explored, push, speed) for number in range(runs)
    ]
    for number, run in enumerate(every):
        clock.after(number * stages.total * prompts / training / runs, run.start)
    clock.run(until=lambda: all(len(run.ended) >= 2 for run in every))
    begin, before = clock.now, dict(service.seconds)
    clock.run(until=lambda: any(len(run.ended) == _ITERATIONS for run in every))
    end, work = clock.now, [service.seconds[run] - before[run] for run in range(runs)]
    shares = [seconds / sum(work) for seconds in work]
    done = [_iterations_at(run.ended, end) - _iterations_at(run.ended, begin) for run in every]
    return Outcome(tuple((end - begin) / iterations / prompts for iterations in done), tuple(shares))


def _iterations_at(ended: Sequence[float], time: float) -> float:
    """Number of iterations that had ended, with the part of the one in progress, which takes as long as the last."""
    number = sum(end <= time for end in ended)
    began = ended[number - 1]
    length = ended[number] - began if number < len(ended) else began - ended[number - 2]
    return number + (time - began) / length
