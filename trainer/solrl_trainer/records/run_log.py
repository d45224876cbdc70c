"""Log of a run: metrics.jsonl, progress in the terminal, reports for the service's page, and trackers."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from solrl_client.retries import Wait
from solrl_client.rollouts import RolloutClient

from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.records.evaluations import Evaluation
from solrl_trainer.records.progress import RichReporter
from solrl_trainer.records.records import HeldOutRecord, IterationRecord
from solrl_trainer.records.status_reports import StatusReporter
from solrl_trainer.records.trackers.run_trackers import Trackers
from solrl_trainer.rollouts.exploration import IterationSamples
from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.rollouts.image_comparisons import ImageComparisons
from solrl_trainer.run_folder.metrics_file import MetricsFile
from solrl_trainer.run_folder.resuming import Change
from solrl_trainer.service.run_requests import RunRequests
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)


class RunLog:
    """Metrics, progress, reports and trackers of a run. Without these, as on all ranks except 0, it does nothing.

    Attributes:
        spearman: rank fidelity of exploration by version, as far as it is measured; only on rank 0.
        requests: to the service, once this device has loaded the model.
    """

    def __init__(
        self,
        metrics: MetricsFile | None = None,
        reporter: RichReporter | None = None,
        status: StatusReporter | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        self._metrics = metrics
        self._trackers = trackers
        self._reporter = reporter
        self._status = status
        self._started = time.perf_counter()
        self._iteration: dict[str, float] = {}
        self._run: dict[str, float] = {}
        self._earlier: dict[str, float] = {}
        self.spearman: dict[int, float] = {}
        self.requests: RunRequests | None = None

    def waiting(self, server: str, wait: Wait | None) -> None:
        """A server is waited for; None: no longer. It is an `OnWait`."""
        if self._reporter is not None:
            self._reporter.waiting(server, wait)

    def pushed_digests(self) -> set[str]:
        """Digests of the adapter files of all iterations in metrics.jsonl."""
        return {line["digest"] for line in self._lines("iteration")}

    def _lines(self, event: str) -> list[dict[str, Any]]:
        return self._metrics.lines(event) if self._metrics is not None else []

    def rewind(self, version: int, *, back: bool = False) -> None:
        """Drop lines beyond `version`; the run continues there, or goes `back` there. −1 drops all lines."""
        if self._metrics is not None:
            self._metrics.rewind(version)
            self._earlier = self._metrics.seconds()
            self.spearman = {line["version"]: line["spearman"] for line in self._lines("fidelity")}
            if self._trackers is not None:
                self._trackers.start(version, anew=back or version < 0)

    def changed(self, version: int, changes: Sequence[Change]) -> None:
        """The run continues from `version` with these changes."""
        if changes:
            self._log("change", version=version, changes={change.name: [change.then, change.now] for change in changes})
            logger.info(f"changed after version {version}: {'; '.join(map(str, changes))}")

    def candidates(self, iteration: int, groups: Iterator[CandidateGroup]) -> Iterator[CandidateGroup]:
        """Yield the groups of an exploration; time spent waiting for a group counts as "wait"."""
        while True:
            with self.phase(iteration, "explore", clock="wait"):
                group = next(groups, None)
            if group is None:
                return
            yield group

    @contextmanager
    def phase(self, iteration: int, name: str, clock: str | None = None) -> Iterator[None]:
        """Show a phase of an iteration, and time it under the name `clock`, by default its own."""
        self._show(iteration, name)
        with _timed(self._iteration, clock or name):
            yield

    def elapsed(self, name: str) -> float:
        """Seconds of a phase of this iteration so far."""
        return self._iteration.get(name, 0.0)

    def counted(self, iteration: int, part: str, done: int, total: int) -> None:
        """So many candidates of an iteration are `part`: explored, regenerated or trained."""
        if self._reporter is not None:
            self._reporter.counted(iteration, part, done, total)

    def samples_ready(self, iteration: int, samples: IterationSamples) -> None:
        """An iteration's samples are complete, and the service has nothing to do for this run."""
        if self._status is not None:
            self._status.show(iteration, samples)

    def comparisons_ready(self, iteration: int, samples: IterationSamples, pairs: ImageComparisons | None) -> None:
        """Explored and regenerated images of the last iteration are there; None if the service refused them."""
        if self._status is not None:
            self._status.show_comparisons(iteration, samples, pairs)

    def iteration_trained(self, record: IterationRecord) -> None:
        """An iteration is trained; its checkpoint and push follow."""
        self._log("iteration", **record.line())

    def iteration_finished(self, record: IterationRecord) -> None:
        """An iteration is pushed."""
        self._log("push", version=record.version, seconds={"push": record.seconds["push"]})
        if self._status is not None:
            self._status.report(record)
        if self._reporter is not None:
            self._reporter.finished(record)
        for name, seconds in record.seconds.items():
            self._run[name] = self._run.get(name, 0.0) + seconds
        self._iteration.clear()

    def ended(self, reason: str) -> None:
        """The run ends before its planned iterations."""
        if self._status is not None:
            self._status.ended(reason)

    @contextmanager
    def measuring(self, version: int, name: str) -> Iterator[None]:
        """Show a measurement on held-out prompts; all of them are timed as "evaluate"."""
        self._show(version, name)
        with _timed(self._run, "evaluate"):
            yield

    def progress(self, done: float, total: float) -> None:
        """Show how much of a measurement is done."""
        if self._reporter is not None:
            self._reporter.progress(done, total)

    def is_evaluated(self, version: int) -> bool:
        """Whether metrics.jsonl has the evaluation of a version."""
        return any(line["version"] == version for line in self.evaluations())

    def evaluations(self) -> list[dict[str, Any]]:
        """Evaluations in metrics.jsonl; only on rank 0."""
        return self._lines("evaluation")

    def evaluated(self, record: HeldOutRecord, evaluation: Evaluation, prompts: Sequence[str]) -> None:
        """A version was evaluated on held-out prompts; a resumed run measures its first version again."""
        version = record.version
        if self._metrics is not None and not self.is_evaluated(version):
            self._log("evaluation", **record.line())
            if self._trackers is not None:
                self._trackers.samples(version, prompts, evaluation.images)
        if self._status is not None:
            self._status.evaluated(record)
        if self._reporter is None or not self._reporter.evaluated(record, evaluation, prompts):
            means = ", ".join(f"{name} {estimate.mean:.4f}" for name, estimate in record.rewards.items())
            logger.info(f"held out, version {version}, images {record.images}: {means}")

    def fidelity(self, version: int, prompts: int, figures: Mapping[str, Any]) -> None:
        """Rank fidelity of exploration at a version."""
        self._log("fidelity", version=version, prompts=prompts, **figures)
        if self._metrics is not None:
            self.spearman[version] = figures["spearman"]

    def seconds(self) -> dict[str, float]:
        """Seconds by phase and in "total", including seconds before the run was resumed."""
        here = {**self._run, "total": time.perf_counter() - self._started}
        return {name: here.get(name, 0.0) + self._earlier.get(name, 0.0) for name in {**self._earlier, **here}}

    def _show(self, iteration: int, name: str) -> None:
        if self._reporter is not None:
            self._reporter.phase(iteration, name)

    def _log(self, event: str, **values: Any) -> None:
        if self._metrics is not None:
            seconds = self.seconds()
            elapsed = {name: seconds.get(name, 0.0) for name in ("evaluate", "total")}
            line = self._metrics.log(event, **values, elapsed=elapsed)
            if self._trackers is not None:
                self._trackers.line(line)


@contextmanager
def open_run_log(
    config: RunConfig, reporter: RichReporter | None, world: Communicator, trackers: Trackers | None = None
) -> Iterator[RunLog]:
    """The log of a run; on exit it waits for the last report. Only rank 0 has metrics, progress and reports."""
    with ExitStack() as stack:
        if world.rank > 0 or reporter is None:
            yield RunLog()
            return
        status = None
        if config.uses_service:
            # A separate client without retries: the run's client retries for minutes.
            client = RolloutClient(config.service_url, timeout=120.0, patience=0.0)

            def requests() -> RunRequests:
                assert log.requests is not None  # there are samples
                return replace(log.requests, client=client, restore=None)

            reports = StatusReporter(client, config, requests)
            status = stack.enter_context(reports)
        metrics = MetricsFile(config.output / "metrics.jsonl")
        log = RunLog(metrics, reporter, status, trackers)
        yield log


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
