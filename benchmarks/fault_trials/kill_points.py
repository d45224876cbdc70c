"""Kill points of a training process, patched into it before it starts."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

PHASES = ("explore", "regenerate", "train", "push")
"""Phases in which the process dies at a random moment."""
FILES = {"state.safetensors": "state", "adapter.safetensors": "adapter", "config.json": "config"}
POINTS = (*PHASES, "line", *FILES.values(), "rename", "saved", "pushed")
"""All points. Besides the phases: half a metrics line or half a checkpoint file written; before and after the renaming
of the checkpoint; and after the service has stored the version, before the trainer receives the answer."""
ENDS = ("evaluate", "rewind", "report")
"""Points outside the iterations: before the first, while a resumed run truncates its metrics, and after the last."""


def die(*_: object, **__: object) -> NoReturn:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def replace(owner: object, name: str, by: Callable[..., Any]) -> None:
    """Replace a function for the rest of this process."""
    patch.object(owner, name, by).start()


@dataclass(frozen=True)
class KillPoint:
    """A death at `point` of `iteration`; in a phase, `delay` seconds after its start."""

    point: str
    iteration: int
    delay: float = 0.0

    def __str__(self) -> str:
        return f"{self.point} of iteration {self.iteration}"

    def plant(self) -> None:
        """Patch this process so that it dies at the point."""
        if self.point in (*PHASES, "evaluate"):
            self._in_phase()
        elif self.point in ("line", "rewind"):
            self._in_metrics()
        elif self.point == "pushed":
            self._after_push()
        elif self.point == "report":
            from solrl_trainer.commands import run

            replace(run, "write_report", die)
        else:
            self._in_checkpoint()

    def _in_phase(self) -> None:
        from solrl_trainer.records.run_log import RunLog

        show = RunLog._show

        def watched(log: RunLog, iteration: int, name: str) -> None:
            show(log, iteration, name)
            if (iteration, name) == (self.iteration, self.point):
                timer = threading.Timer(self.delay, die)
                timer.daemon = True
                timer.start()

        replace(RunLog, "_show", watched)

    def _in_metrics(self) -> None:
        from solrl_trainer.records.metrics_file import MetricsFile

        log = MetricsFile.log

        def half(metrics: MetricsFile, event: str, **values: Any) -> None:
            log(metrics, event, **values)
            if event == "iteration" and values["iteration"] == self.iteration:
                size = metrics._path.stat().st_size
                os.truncate(metrics._path, size - 40)
                die()

        if self.point == "line":
            replace(MetricsFile, "log", half)
        else:
            _break_text("metrics.jsonl.partial")

    def _after_push(self) -> None:
        from solrl_client.rollouts import RolloutClient

        push = RolloutClient.push

        def last(client: RolloutClient, run: str, version: int, *rest: Any) -> Any:
            info = push(client, run, version, *rest)
            return die() if version == self.iteration + 1 else info

        replace(RolloutClient, "push", last)

    def _in_checkpoint(self) -> None:
        from solrl_trainer.records import checkpoints

        save = checkpoints.save

        def doomed(folder: Path, version: int, *rest: Any) -> Path:
            if version >= self.iteration + 1:  # or the next version that is saved
                self._break_files()
            saved = save(folder, version, *rest)
            return die() if version >= self.iteration + 1 else saved

        replace(checkpoints, "save", doomed)

    def _break_files(self) -> None:
        write = Path.write_bytes

        def half(path: Path, data: bytes) -> int:
            if FILES.get(path.name) == self.point:
                write(path, data[: len(data) // 2])
                die()
            return write(path, data)

        replace(Path, "write_bytes", half)
        if self.point == "config":
            _break_text("config.json")
        if self.point == "rename":
            replace(Path, "rename", die)


def _break_text(name: str) -> None:
    write = Path.write_text

    def half(path: Path, data: str, *rest: Any, **options: Any) -> int:
        if path.name == name:
            write(path, data[: len(data) // 2], *rest, **options)
            die()
        return write(path, data, *rest, **options)

    replace(Path, "write_text", half)
