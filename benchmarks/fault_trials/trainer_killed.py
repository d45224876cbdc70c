"""A trainer killed in each phase and resumed: its result equals that of an uninterrupted run bit for bit."""

import random
import shutil
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from solrl_trainer.records.metrics_file import read_metrics
from solrl_trainer.settings.defaults import DEFAULT_PRESET

from fault_trials import child
from fault_trials.adapters import SMALL
from fault_trials.event_log import EventLog
from fault_trials.findings import Findings, Row
from fault_trials.kill_points import ENDS, PHASES, POINTS, KillPoint
from fault_trials.processes import Program, RolloutService, rollout_service

_LANES = 2
_JUDGING = threading.Lock()
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
        """Flags of `solrl-train run`."""
        more = (f"explore.lag={self.lag}", f"checkpoint_every={self.every}", *self.further)
        return [word for setting in (*SMALL, *more) for word in ("--set", setting)]


KINDS = (Kind(2, lag=0, every=1), Kind(2, lag=0, every=1), Kind(3, lag=1, every=2))


class Run:
    """Folder of a run, and the processes that write to it."""

    def __init__(self, folder: Path, name: str, kind: Kind, service: RolloutService) -> None:
        self.folder, self.name, self.kind, self._service = folder / name, name, kind, service
        folder.mkdir(exist_ok=True)
        self.event_log = EventLog(folder / f"{name}.jsonl")
        self.log_path = folder / f"{name}.log"

    def argv(self, *, resume: bool) -> list[str]:
        """Arguments of `solrl-train`."""
        argv = ["run", "--preset", DEFAULT_PRESET, "--rollout-url", self._service.url, "--run", self.name]
        argv += ["--resume" if resume else "--output", str(self.folder)]
        return [*argv, "--iterations", str(self.kind.iterations), *self.kind.settings]

    def begin(self, kill_point: KillPoint | None = None, *, resume: bool = False) -> Program:
        """Start one training process."""
        return Program(child.train, (self.argv(resume=resume), str(self.event_log.path), kill_point), self.log_path)

    def go(self, kill_point: KillPoint | None = None, *, resume: bool = False) -> int:
        """Run one training process; returns its exit code."""
        return self.begin(kill_point, resume=resume).wait()

    def remove(self) -> None:
        """Delete the run's folder and its adapters at the service."""
        shutil.rmtree(self.folder)
        self._service.http.delete(f"/v1/runs/{self.name}")

    @property
    def log(self) -> str:
        """End of the processes' output."""
        return self.log_path.read_text(errors="replace")[-600:]

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Longest duration of each phase."""
        lines = [one["seconds"] for one in read_metrics(self.folder / "metrics.jsonl") if "seconds" in one]
        # The trainer's time in the phase explore is logged as wait.
        clocked = {phase: "wait" if phase == "explore" else phase for phase in PHASES}
        return {phase: max(line.get(name, 0.0) for line in lines) for phase, name in clocked.items()}

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Final weights, averages and optimiser state."""
        state: dict[str, torch.Tensor] = load_file(self._last / "state.safetensors")
        return state

    @property
    def _last(self) -> Path:
        return self.folder / "checkpoints" / f"{self.kind.iterations:06d}"

    @property
    def adapters(self) -> dict[str, bytes]:
        """Adapter files of the last checkpoint."""
        return {path.name: path.read_bytes() for path in self._last.glob("adapter*")}

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of the metrics, without times."""
        kept = [one for one in read_metrics(self.folder / "metrics.jsonl") if one["event"] != "push"]
        return [{key: value for key, value in one.items() if key not in ("time", "seconds", "scoring")} for one in kept]

    @cached_property
    def pushed(self) -> dict[int, str]:
        """Digests of the versions at the service, which may be killed later."""
        held = self._service.http.get(f"/v1/runs/{self.name}/adapters").json()
        return {one["version"]: one["digest"] for one in held["versions"]}

    @property
    def noted(self) -> set[str]:
        """Distinct events: gathered samples, and the state that each update started from."""
        return {str({key: value for key, value in one.items() if key != "at"}) for one in self.event_log.events()}


_FIRST = ("explore", "regenerate", "train", "state", "push")
"""Points at which the first trial dies in succession. The tests run only this one, and it must cover every phase."""


def run(trials: int, findings: Findings) -> None:
    """Run `trials` trainings, each killed once, twice, or in every phase."""
    with tempfile.TemporaryDirectory(prefix="solrl-runs-") as name, rollout_service() as service:
        folder = Path(name)
        whole: dict[Kind, Run] = {}
        for kind in KINDS[:trials]:
            if kind not in whole:
                whole[kind] = Run(folder, f"whole-{len(whole)}", kind, service)
                if code := whole[kind].go():
                    raise RuntimeError(f"the uninterrupted run ended with {code}: {whole[kind].log}")
        with ThreadPoolExecutor(_LANES) as pool:

            def one(number: int) -> None:
                kind = KINDS[number % len(KINDS)]
                kill_points = _dooms(number, whole[kind])
                trial = Run(folder, f"run-{number}", kind, service)
                _trial(trial, whole[kind], kill_points, findings)

            try:
                list(pool.map(one, range(trials)))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # otherwise all remaining trials would run
                raise
    for phase in PHASES:
        findings.require(bool(findings.counted.get(f"killed in {phase}")), "at the end", f"none was killed in {phase}")


def _dooms(number: int, whole: Run) -> Sequence[KillPoint]:
    """Kill points of a trial: the next point; every fourth trial, and the first one, die again after resuming."""
    chance = random.Random(number)

    def kill_point(point: str, iteration: int) -> KillPoint:
        return KillPoint(point, iteration, chance.uniform(0, 0.9) * whole.seconds.get(point, 0.3))

    if number == 0:
        return [kill_point(point, 0) for point in _FIRST]
    # Kinds and points advance together, so this mixes every kind with every point.
    turn = number // len(KINDS) + number % len(KINDS) * 5
    everywhere = [(point, i) for i in range(2) for point in POINTS] + [(ENDS[0], 0), (ENDS[2], 0)]
    first = kill_point(*everywhere[turn % len(everywhere)])
    if number % 4 != 3:
        return [first]
    last = whole.kind.iterations - 1
    return [first, kill_point("rewind", 0) if number % 8 == 3 else kill_point(chance.choice(POINTS[:3]), last)]


def _trial(trial: Run, whole: Run, kill_points: Sequence[KillPoint], findings: Findings) -> None:
    name = f"{trial.kind}, {', then '.join(map(str, kill_points))}"
    codes = [trial.go(kill_point, resume=i > 0) for i, kill_point in enumerate(kill_points)]
    # A phase may end before its kill; the run must then have finished.
    died = codes.count(_KILLED)
    end = trial.go(resume=True)
    with _JUDGING:
        findings.done(name)
        for kill_point, code in zip(kill_points, codes, strict=True):
            findings.add(f"killed in {kill_point.point}", code == _KILLED)
        findings.add("killed more than once", died > 1)
        findings.add("ended before its death came", codes.count(0))
        findings.require(set(codes) <= {_KILLED, 0}, name, f"killed runs ended with {codes}: {trial.log}")
        findings.require(end == 0, name, f"the resumed run ended with {end}: {trial.log}")
        if end == 0:
            compare(name, trial, whole, findings)
            trial.remove()


def compare(name: str, trial: Run, whole: Run, findings: Findings, *, noted: bool = True) -> None:
    """Require that a resumed run equals an uninterrupted one; `noted`: also in what its process trained on."""
    state, wanted = trial.state, whole.state
    same = state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
    findings.require(same, name, "weights or optimiser differ")
    findings.require(trial.adapters == whole.adapters, name, "adapters differ")
    same = not noted or trial.noted == whole.noted
    findings.require(same, name, f"seeds, samples or RNG differ: {trial.noted ^ whole.noted}")
    findings.require(trial.lines == whole.lines, name, f"metrics differ: {trial.lines} != {whole.lines}")
    held, pushed = trial.pushed, whole.pushed
    same = all(pushed[version] == digest for version, digest in held.items())
    findings.require(same and max(held) == max(pushed), name, f"the service holds {held}, not {pushed}")
    findings.require((trial.folder / "report.html").is_file(), name, "there is no report")


ROW = Row(
    "trainer-killed",
    "trainer killed at each phase, resumed: weights, optimiser, RNG, chosen seeds equal to the uninterrupted run bit "
    "for bit",
    full=50,
    short=1,
    run=run,
)
