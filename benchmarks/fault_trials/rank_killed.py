"""One of several ranks killed in each phase: all end and name it, and the resumed run equals an undisturbed one."""

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from fault_trials import child
from fault_trials.findings import Findings, Row
from fault_trials.kill_points import PHASES, KillPoint
from fault_trials.processes import RankPrograms, RolloutService, rollout_service
from fault_trials.trainer_killed import Kind, Run, compare

_KIND = Kind(2, lag=0, every=1)
_SIZES = (2, 3)
_KILLED = -9


class SharedRun(Run):
    """A run of several ranks."""

    def __init__(self, folder: Path, name: str, size: int, service: RolloutService) -> None:
        super().__init__(folder, name, _KIND, service)
        self.size = size

    def argv(self, *, resume: bool) -> list[str]:
        """Arguments of `solrl-train`; each rank has a prompt."""
        return [*super().argv(resume=resume), "--set", f"explore.prompts={max(_SIZES)}"]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of the iterations; ranks evaluate held-out images in other batches, which changes the last digits."""
        return [one for one in super().lines if one["event"] == "iteration"]

    def start(
        self, victim: int | None = None, kill_point: KillPoint | None = None, *, resume: bool = False
    ) -> RankPrograms:
        """Start all ranks; `kill_point` kills `victim`."""
        arguments = (self.argv(resume=resume), str(self.event_log.path), victim, kill_point)
        return RankPrograms(self.size, train_rank, arguments, self.log_path)

    def begun(self, iteration: int) -> int:
        """Number of times that rank 0 began to train an iteration."""
        events = self.event_log.events()
        return sum(
            (one["event"], one.get("rank"), one.get("iteration")) == ("begins", "0", iteration) for one in events
        )


def train_rank(argv: list[str], event_log: str, victim: int | None, kill_point: KillPoint | None) -> None:
    """`solrl-train run` as a rank; `kill_point` kills it if it is the victim."""
    child.train(argv, event_log, kill_point if os.environ["RANK"] == str(victim) else None)


def run(trials: int, findings: Findings) -> None:
    """Run `trials` trainings; in each, one rank is killed once."""
    with tempfile.TemporaryDirectory(prefix="solrl-ranks-") as name, rollout_service() as service:
        whole = SharedRun(Path(name), "whole", 1, service)
        if code := whole.start().wait():
            raise RuntimeError(f"the undisturbed run ended with {code}: {whole.log}")
        chance = random.Random(0)
        for number in range(trials):
            size = _SIZES[number % len(_SIZES)]
            phase = PHASES[number // 2 % len(PHASES)]
            # Alternate between the last rank and the first.
            victim = 0 if number % 4 == 3 else size - 1
            delay = chance.uniform(0, 0.9) * whole.seconds.get(phase, 0.3)
            trial = SharedRun(Path(name), f"run-{number}", size, service)
            _trial(trial, whole, victim, KillPoint(phase, number % _KIND.iterations, delay), findings)


def _trial(trial: SharedRun, whole: SharedRun, victim: int, kill_point: KillPoint, findings: Findings) -> None:
    name = f"rank {victim} of {trial.size}, {kill_point}"
    started = time.monotonic()
    code = trial.start(victim, kill_point).wait()
    log = trial.log_path.read_text()
    died = f"exitcode  : {_KILLED} " in log
    findings.done(name)
    findings.add(f"killed in {kill_point.point}", died)
    findings.add("rank 0 killed", died and victim == 0)
    findings.most("most seconds until all had ended", round(time.monotonic() - started))
    if died:
        report = log.partition("Root Cause")
        findings.require(log.count("solrl-train: stopped by SIGTERM") == 1, name, f"not one message: {trial.log}")
        named = f"rank      : {victim} " in report[2] and "<NO_OTHER_FAILURES>" in report[0]
        findings.require(named, name, f"it is not said which: {trial.log}")
    else:
        findings.add("ended before its death came")
        findings.require(code == 0, name, f"ended with {code}: {trial.log}")
    code = trial.start(resume=True).wait()
    findings.require(code == 0, name, f"the resumed run ended with {code}: {trial.log}")
    if code == 0:
        again = [trial.begun(iteration) for iteration in range(_KIND.iterations)]
        wanted = [2 if died and iteration == kill_point.iteration else 1 for iteration in range(_KIND.iterations)]
        fewer = all(one <= most for one, most in zip(again, wanted, strict=True))
        findings.require(fewer, name, f"iterations were begun {again} times")
        compare(name, trial, whole, findings, noted=False)
        trial.remove()


ROW = Row(
    "rank-killed",
    "a rank of 2 or 3 killed in each phase: all end and name it; resumed, only the unfinished iteration is done again, "
    "and weights and optimiser are equal bit for bit to one process undisturbed",
    full=50,
    short=1,
    run=run,
)
