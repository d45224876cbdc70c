"""Runs with a real service, for the tests of the loop."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from solrl_client.retries import Wait
from solrl_proto.adapters import AdapterList, adapter_digest
from solrl_trainer.loop import Result, train
from solrl_trainer.records.records import IterationRecord
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.config import RunConfig
from tests.support.ports import free_port
from tests.support.service_helpers import RunningService, running_service
from tests.support.small_model import small_model
from tests.trainer.training_helpers import state, tiny_config

SMALL = (
    *("explore.prompts=2", "explore.candidates=12", "explore.keep=4", "explore.steps=2", "explore.precision=nvfp4"),
    *("evaluate.prompts=4", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.fidelity_prompts=1"),
    *("optimizer.updates=1", "optimizer.batch=16", "algorithm.timestep_fraction=0.5"),
)


class Service:
    """A service on one port, which can be killed and restarted without its adapters."""

    def __init__(self, model: str | None = None) -> None:
        self.model = model or small_model()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self.running: RunningService = self._stack.enter_context(running_service(model=self.model, port=self.port))

    def stop(self) -> None:
        self._stack.close()

    def die(self) -> None:
        """Kill it: after a signal to stop, it would first finish accepted requests, and nothing would be lost."""
        self.running.process.kill()
        with suppress(AssertionError):  # about its exit code
            self._stack.close()

    def adapters(self, run: str) -> AdapterList:
        return AdapterList.model_validate(self.running.client.get(f"/v1/runs/{run}/adapters").json())


@dataclass
class Watcher:
    """A reporter that records, restarts the given service, if any, after one iteration, and stops at a phase.

    It stops only once `may_stop()`: a stopped run does not wait for its push.
    """

    restarts: Service | None = None
    stops_at: tuple[int, str] | None = None
    may_stop: Callable[[], bool] = lambda: True
    phases: list[tuple[int, str]] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    records: list[IterationRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def phase(self, iteration: int, name: str) -> None:
        self.phases.append((iteration, name))
        if (iteration, name) == self.stops_at:
            while not self.may_stop():
                time.sleep(0.05)
            raise KeyboardInterrupt

    def progress(self, done: float, total: float) -> None:
        self.measured.append(done / total)

    def counted(self, iteration: int, part: str, done: int, total: int) -> None:
        pass

    def waiting(self, server: str, wait: Wait | None) -> None:
        pass

    def evaluated(self, *of: object) -> bool:
        return False

    def finished(self, record: IterationRecord) -> None:
        self.records.append(record)
        if self.restarts is not None:
            self.restarts.die()
            self.restarts.start()
            self.restarts = None


@dataclass
class Run:
    """A finished training, the versions that the service stored at its end, and what its page showed of it."""

    config: RunConfig
    result: Result
    watcher: Watcher
    held: AdapterList
    shown: dict[str, Any]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return state(self.config.output, 2)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.config.output / "metrics.jsonl")

    def adapter_digest(self, version: int) -> str:
        return adapter_digest((self.config.output / f"checkpoints/{version:06d}/adapter.safetensors").read_bytes())


def go(service: Service, output: Path, *overrides: str, watcher: Watcher | None = None, resume: bool = False) -> Run:
    watcher = watcher or Watcher()
    served = (f"model={service.model}", f"rollout_url={service.url}")
    config = tiny_config(*SMALL, *served, *overrides, output=output, run=output.name)
    with shown_log(watcher.notes.append):
        result = train(config, watcher, resume=resume)
    shown = service.running.client.get(f"/v1/runs/{config.run}/iterations").json()
    return Run(config, result, watcher, service.adapters(config.run), shown)


def selected(run: Run) -> list[list[int]]:
    """Seeds of the samples that the last iteration trained on, by prompt."""
    return [list(group.seeds) for group in run.result.samples.groups]
