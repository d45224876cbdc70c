"""A training killed in each phase and resumed, alone, beside a service that explores a share, or on several ranks.

Its result equals that of an undisturbed run bit for bit.
"""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.defaults import DEFAULT_PRESET
from tests.support.programs import Program, RankPrograms

from fault_trials import child
from fault_trials.adapters import SMALL
from fault_trials.event_log import EventLog
from fault_trials.findings import Findings, Row
from fault_trials.kill_points import ENDS, PHASES, POINTS, KillPoint
from fault_trials.services import RolloutService, rollout_service

_KILLED = -9


@dataclass(frozen=True)
class Kind:
    """A kind of run: number of iterations, lag, iterations between checkpoints, and further settings."""

    iterations: int
    lag: int
    every: int
    further: tuple[str, ...] = ()

    @property
    def settings(self) -> list[str]:
        more = (f"explore.lag={self.lag}", f"checkpoint_every={self.every}", *self.further)
        return [word for setting in (*SMALL, *more) for word in ("--set", setting)]


_DIVIDED = ("explore.share=0.5", "explore.prompts=4")
"""The trainer explores half of the prompts."""
ALONE = (Kind(2, lag=0, every=1), Kind(2, lag=0, every=1), Kind(3, lag=1, every=2))
DIVIDED = (Kind(3, lag=1, every=1, further=_DIVIDED), Kind(3, lag=0, every=2, further=_DIVIDED))
SHARED = Kind(2, lag=0, every=1, further=("explore.prompts=3",))
SIZES = (2, 3)
"""Numbers of ranks; each rank has a prompt."""
_FIRST = ("explore", "regenerate", "train", "state", "push")
"""Points at which the first trial dies in succession. The tests run only this one, and it must cover every phase."""


@dataclass
class Run:
    """Folder of a run, and the processes that write to it: one, or several ranks by torchrun."""

    folder: Path
    kind: Kind
    service: RolloutService
    ranks: int = 0

    def __post_init__(self) -> None:
        self.name = self.folder.name
        self.folder.mkdir()
        self.event_log = EventLog(self.folder.with_suffix(".jsonl"))
        self.log_path = self.folder.with_suffix(".log")

    def begin(self, kill_point: KillPoint | None = None, *, resume: bool = False, victim: int = 0) -> Program:
        """Start the training; `kill_point` kills rank `victim`."""
        argv = ["run", "--preset", DEFAULT_PRESET, "--rollout-url", self.service.url, "--run", self.name]
        argv += ["--resume" if resume else "--output", str(self.folder)]
        argv += ["--iterations", str(self.kind.iterations), *self.kind.settings]
        arguments = (argv, str(self.event_log.path), kill_point, victim)
        if self.ranks:
            return RankPrograms(self.ranks, child.train, arguments, self.log_path)
        return Program(child.train, arguments, self.log_path)

    def go(self, kill_point: KillPoint | None = None, *, resume: bool = False, victim: int = 0) -> int:
        """Train as `begin`; returns the exit code."""
        return self.begin(kill_point, resume=resume, victim=victim).wait()

    def remove(self) -> None:
        shutil.rmtree(self.folder)
        self.service.http.delete(f"/v1/runs/{self.name}")

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-600:]

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Longest duration of each phase."""
        lines = [one["seconds"] for one in read_metrics(self.folder / "metrics.jsonl") if "seconds" in one]
        # The trainer's time in the phase explore is logged as wait.
        clocked = {phase: "wait" if phase == "explore" else phase for phase in PHASES}
        return {phase: max(line.get(name, 0.0) for line in lines) for phase, name in clocked.items()}

    @property
    def result(self) -> dict[str, Any]:
        """Last weights, averages, optimiser state and adapters, and the metrics without times."""
        last = self.folder / "checkpoints" / f"{self.kind.iterations:06d}"
        lines = [one for one in read_metrics(self.folder / "metrics.jsonl") if one["event"] != "push"]
        if self.kind is SHARED:  # ranks evaluate held-out images in other batches, which changes the last digits
            lines = [one for one in lines if one["event"] == "iteration"]
        timed = ("time", "elapsed", "seconds", "scoring")
        return {
            "weights or optimiser": load_file(last / "state.safetensors"),
            "adapters": {path.name: path.read_bytes() for path in last.glob("adapter*")},
            "metrics": [{key: value for key, value in one.items() if key not in timed} for one in lines],
        }

    @cached_property
    def pushed(self) -> dict[int, str]:
        """Digests of the versions at the service, which may be killed later."""
        held = self.service.http.get(f"/v1/runs/{self.name}/adapters").json()
        return {one["version"]: one["digest"] for one in held["versions"]}

    @property
    def noted(self) -> set[str]:
        """Distinct events: gathered samples, and the state that each update started from."""
        return {str({key: value for key, value in one.items() if key != "at"}) for one in self.event_log.events()}


Way = Callable[[int, Run, Run, Findings], tuple[str, int]]
"""Trains a run that loses something on the way, and resumes it: the trial's name, and the last exit code. Of the
number of the trial, its run, the undisturbed one, and the findings."""


def train(trials: int, findings: Findings, kind_of: Callable[[int], Kind], way: Way) -> None:
    """Run `trials` trainings of kinds by number, each disturbed and compared with an undisturbed one."""
    with tempfile.TemporaryDirectory(prefix="solrl-runs-") as folder, rollout_service() as service:
        whole: dict[Kind, Run] = {}
        for number in range(trials):
            kind = kind_of(number)
            if kind not in whole:
                whole[kind] = Run(Path(folder, f"whole-{len(whole)}"), kind, service)
                if code := whole[kind].go():
                    raise RuntimeError(f"the undisturbed run ended with {code}: {whole[kind].log}")
                assert whole[kind].pushed
            ranks = SIZES[number % len(SIZES)] if kind is SHARED else 0
            trial = Run(Path(folder, f"run-{number}"), kind, service, ranks)
            name, end = way(number, trial, whole[kind], findings)
            findings.done(name)
            findings.require(end == 0, name, f"the run ended with {end}: {trial.log}")
            if end == 0:
                compare(name, trial, whole[kind], findings)
                trial.remove()


def compare(name: str, trial: Run, whole: Run, findings: Findings) -> None:
    """Require that a resumed run equals an undisturbed one; a single process also in what it trained on."""
    wanted = whole.result
    for what, found in trial.result.items():
        findings.require(_equal(found, wanted[what]), name, f"{what} differ")
    if not trial.ranks:
        differ = trial.noted ^ whole.noted
        findings.require(not differ, name, f"seeds, samples or RNG differ: {differ}")
    held, pushed = trial.pushed, whole.pushed
    same = all(pushed[version] == digest for version, digest in held.items())
    findings.require(same and max(held) == max(pushed), name, f"the service holds {held}, not {pushed}")
    findings.require((trial.folder / "report.html").is_file(), name, "there is no report")


def _equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_equal(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


def _die(number: int, trial: Run, whole: Run, findings: Findings) -> tuple[str, int]:
    """Kill the trainer once, twice, or in every phase."""
    kill_points = _dooms(number, whole)
    name = f"{trial.kind}, {', then '.join(map(str, kill_points))}"
    codes = [trial.go(kill_point, resume=i > 0) for i, kill_point in enumerate(kill_points)]
    for kill_point, code in zip(kill_points, codes, strict=True):
        findings.add(f"killed in {kill_point.point}", code == _KILLED)
    findings.add("killed more than once", codes.count(_KILLED) > 1)
    # A phase may end before its kill; the run must then have finished.
    findings.add("ended before its death came", codes.count(0))
    findings.require(set(codes) <= {_KILLED, 0}, name, f"killed runs ended with {codes}: {trial.log}")
    return name, trial.go(resume=True)


def _dooms(number: int, whole: Run) -> Sequence[KillPoint]:
    """Kill points of a trial: the next point; every fourth trial, and the first one, die again after resuming."""
    chance = random.Random(number)

    def kill_point(point: str, iteration: int) -> KillPoint:
        return KillPoint(point, iteration, chance.uniform(0, 0.9) * whole.seconds.get(point, 0.3))

    if number == 0:
        return [kill_point(point, 0) for point in _FIRST]
    # Kinds and points advance together, so this mixes every kind with every point.
    turn = number // len(ALONE) + number % len(ALONE) * 5
    everywhere = [(point, i) for i in range(2) for point in POINTS] + [(ENDS[0], 0), (ENDS[2], 0)]
    first = kill_point(*everywhere[turn % len(everywhere)])
    if number % 4 != 3:
        return [first]
    last = whole.kind.iterations - 1
    return [first, kill_point("rewind", 0) if number % 8 == 3 else kill_point(chance.choice(POINTS[:3]), last)]


def _divide(number: int, trial: Run, whole: Run, findings: Findings) -> tuple[str, int]:
    """In turn: kill the service with candidates on their way, the trainer, and the service with its newest version.

    The service holds adapters in memory.
    """
    chance, service, kind = random.Random(number), trial.service, trial.kind
    what = ("service killed with candidates on their way", "trainer killed", "version lost that had been acknowledged")[
        number % 3
    ]
    name = f"{what} at lag {kind.lag}"
    if number % 3 == 1:
        point = chance.choice(("explore", "regenerate", "train", "train", "push"))
        delay = chance.uniform(0, 0.9) * whole.seconds[point]
        code = trial.go(KillPoint(point, chance.randrange(1, kind.iterations), delay))
        findings.add(f"trainer killed in {point}", code == _KILLED)
        return name, trial.go(resume=True)
    since, first = service.event_log.size, chance.randrange(6, 6 * kind.iterations)
    version = chance.randrange(1, kind.iterations)

    def reached() -> bool:
        """Whether as many chunks are made, or the version is held."""
        if number % 3 == 0:
            events = service.event_log.events(since)
            return sum(one["event"] == "made" and one["run"] == trial.name for one in events) >= first
        held = service.http.get(f"/v1/runs/{trial.name}/adapters")
        return held.is_success and any(one["version"] >= version for one in held.json()["versions"])

    program = trial.begin()
    while program.alive and not reached():
        time.sleep(0.02)
    if program.alive:
        findings.add(what)
        service.kill()
        service.start()
    return name, program.wait()


def _lose_a_rank(number: int, trial: Run, whole: Run, findings: Findings) -> tuple[str, int]:
    """Kill a rank; all must end, and torchrun must say which died."""
    phase = PHASES[number // 2 % len(PHASES)]
    # Alternate between the last rank and the first.
    victim = 0 if number % 4 == 3 else trial.ranks - 1
    delay = random.Random(number).uniform(0, 0.9) * whole.seconds.get(phase, 0.3)
    kill_point = KillPoint(phase, number % trial.kind.iterations, delay)
    name = f"rank {victim} of {trial.ranks}, {kill_point}"
    started = time.monotonic()
    code = trial.go(kill_point, victim=victim)
    log = trial.log_path.read_text()
    died = f"exitcode  : {_KILLED} " in log
    findings.add(f"killed in {kill_point.point}", died)
    findings.add("rank 0 killed", died and victim == 0)
    findings.most("most seconds until all had ended", round(time.monotonic() - started))
    if died:
        others, _, cause = log.partition("Root Cause")
        findings.require(log.count("solrl-train: stopped by SIGTERM") == 1, name, f"not one message: {trial.log}")
        named = f"rank      : {victim} " in cause and "<NO_OTHER_FAILURES>" in others
        findings.require(named, name, f"it is not said which: {trial.log}")
    else:
        findings.add("ended before its death came")
        findings.require(code == 0, name, f"ended with {code}: {trial.log}")
    end = trial.go(resume=True)
    begun = [one["iteration"] for one in trial.event_log.events() if (one["event"], one["rank"]) == ("begins", "0")]
    for iteration in range(trial.kind.iterations):
        times = begun.count(iteration)
        most = 2 if died and iteration == kill_point.iteration else 1
        findings.require(times <= most, name, f"iteration {iteration} was begun {times} times")
    return name, end


def trainer_killed(trials: int, findings: Findings) -> None:
    """Run `trials` trainings, each killed once, twice, or in every phase."""
    train(trials, findings, lambda number: ALONE[number % len(ALONE)], _die)
    for phase in PHASES:
        findings.require(bool(findings.counted.get(f"killed in {phase}")), "at the end", f"none was killed in {phase}")


ROWS = (
    Row(
        "trainer-killed",
        "trainer killed at each phase, resumed: weights, optimiser, RNG, chosen seeds equal to the uninterrupted run "
        "bit for bit",
        full=50,
        short=1,
        run=trainer_killed,
    ),
    Row(
        "divided-killed",
        "a run that explores half of its prompts itself: service killed with candidates on their way, trainer killed "
        "and resumed, newest version lost: result equal to the uninterrupted run bit for bit",
        full=60,
        short=3,
        run=partial(train, kind_of=lambda number: DIVIDED[number // 3 % len(DIVIDED)], way=_divide),
    ),
    Row(
        "rank-killed",
        "a rank of 2 or 3 killed in each phase: all end and name it; resumed, only the unfinished iteration is done "
        "again, and weights and optimiser are equal bit for bit to one process undisturbed",
        full=50,
        short=1,
        run=partial(train, kind_of=lambda number: SHARED, way=_lose_a_rank),
    ),
)
