"""One trainer's side of a comparison in turns: it waits for each turn, times its parts, and reports them."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from multiprocessing.connection import Connection
from typing import Any

import torch
from solrl_proto.rollouts import PromptItem
from solrl_trainer.prompts.prompt_sets import PromptSet

WARM_UP = -1
"""Number of the turn in which code is compiled, and libraries choose their kernels."""
DPM, EULER, STOCHASTIC = "DPM-Solver++(2M)", "Euler", "stochastic Euler"
TORCH = "torch's"
BEHAVIOUR, COMPUTED, RECORDED = "behaviour policy", "computed", "recorded"


@dataclass(frozen=True)
class Work:
    """What every trainer does in a turn: it generates the samples of each prompt, and trains on all of them.

    Attributes:
        model: flux, sd3 (SD3.5-L) or sd3-medium.
        recipe: of ours, which trains as the peer does.
        device: cuda, or cpu for the miniatures.
        samples: number of samples of a prompt; a trainer whose batches do not divide it rounds it up.
        prompts: prompts of every turn.
        seed: of weights and noise.
        learning: settings of all trainers; None for each one's own, and a reward that costs nothing.
        compiled: whether peers sample with a compiled copy of the model, if they have that. Then we do not train.
    """

    model: str
    recipe: str
    device: str
    samples: int
    prompts: tuple[str, ...] = ("2 red circles",)
    seed: int = 42
    learning: "Learning | None" = None
    compiled: bool = False


@dataclass(frozen=True)
class Learning:
    """Settings of trainings whose rewards are compared. The samples of a prompt are a batch."""

    reward: str = "clipscore"
    learning_rate: float = 1e-3
    timestep_fraction: float = 0.3
    same_draws: bool = False
    """Whether a peer uses our initial noise, noise levels and training noise."""


LEARNINGS = {"diffusionnft": Learning(), "flowgrpo": Learning(timestep_fraction=1.0)}
"""Recipe → its settings."""


def prompt_set(work: Work) -> PromptSet:
    """The prompts as our trainer draws them."""
    return PromptSet(([PromptItem(id=str(number), text=text) for number, text in enumerate(work.prompts)],))


class TurnsOverError(Exception):
    """There are no more turns: leaves a peer's endless loop."""


class Turns:
    """Seconds and peak memory of a trainer's parts. The first turn is a warm-up, and is not reported.

    Attributes:
        warming: whether the turn is the warm-up.
        facts: how the trainer works, by column of the page; sent at the end of a turn.
        scores: of the turn's samples.
    """

    def __init__(self, pipe: Connection, device: str) -> None:
        self.warming = True
        self.facts: dict[str, Any] = {}
        self.scores: list[float] = []
        self._pipe = pipe
        self._on_gpu = device != "cpu"
        self._waited = False
        self._part: str | None = None
        self._seconds, self._samples, self._cpu = 0.0, 0, 0.0
        self._began: float | None = None

    def wait(self) -> None:
        """End the turn, and wait for the next; also before the first.

        Raises:
            TurnsOverError: there is none.
        """
        self._report()
        if self._on_gpu:
            torch.cuda.empty_cache()
        if self._waited:
            score, cpu = statistics.fmean(self.scores), time.process_time() - self._cpu
            self._pipe.send({"facts": self.facts, "score": score, "cpu": cpu})
            self.scores.clear()
        self._waited = True
        turn = self._pipe.recv()
        if turn is None:
            raise TurnsOverError
        self.warming = turn == WARM_UP
        self._cpu = time.process_time()

    def begin(self, part: str, samples: int) -> None:
        """Begin, or go on with, a part: "sample" or "train" so many samples, until `end` or the end of the turn."""
        if part != self._part:
            self._report()
            self._part = part
            if self._on_gpu:
                torch.cuda.reset_peak_memory_stats()
        self._samples += samples
        self._began = self._time()

    def end(self) -> None:
        """What follows is no work of the part."""
        if self._began is not None:
            self._seconds += self._time() - self._began
            self._began = None

    @contextmanager
    def part(self, part: str, samples: int) -> Iterator[None]:
        """The block belongs to the part."""
        self.begin(part, samples)
        yield
        self.end()

    def _report(self) -> None:
        """Send the last part."""
        self.end()
        if not self.warming and self._part is not None:
            peak = torch.cuda.max_memory_allocated() if self._on_gpu else None
            figures = {"s": self._seconds / self._samples, "samples": self._samples, "peak": peak}
            self._pipe.send({"part": self._part, **figures})
        self._part, self._seconds, self._samples = None, 0.0, 0

    def _time(self) -> float:
        """The time, once the GPU has done its work."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def timed_as(part: str, turns: Turns, samples: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as the part of a turn that makes or trains so many samples."""

    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with turns.part(part, samples):
            return function(*args, **kwargs)

    return timed
