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
FILES = {
    "state": ("write_bytes", "state.safetensors"),
    "adapter": ("write_bytes", "adapter.safetensors"),
    "config": ("write_text", "config.json"),
}
"""Point → method of Path that writes the file, and its name."""
POINTS = (*PHASES, "line", *FILES, "rename", "saved", "pushed")
"""All points. Besides the phases: half a metrics line or half a checkpoint file written; before and after the renaming
of the checkpoint; and after the service has stored the version, before the trainer receives the answer."""
ENDS = ("evaluate", "rewind", "report")
"""Points outside the iterations: before the first, while a resumed run truncates its metrics, and after the last."""


def die(*_: object, **__: object) -> NoReturn:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def replace(owner: object, name: str, by: Callable[..., Any]) -> None:
    patch.object(owner, name, by).start()


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Have `act` called with the arguments before each call of a function."""
    call = getattr(owner, name)

    def watched(*args: Any, **named: Any) -> Any:
        act(*args, **named)
        return call(*args, **named)

    replace(owner, name, watched)


def after(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Have `act` called with the arguments after each call of a function."""
    call = getattr(owner, name)

    def watched(*args: Any, **named: Any) -> Any:
        made = call(*args, **named)
        act(*args, **named)
        return made

    replace(owner, name, watched)


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
        from solrl_client.rollouts import RolloutClient
        from solrl_trainer.commands import run
        from solrl_trainer.records.run_log import RunLog
        from solrl_trainer.run_folder import checkpoints
        from solrl_trainer.run_folder.metrics_file import MetricsFile

        if self.point in (*PHASES, "evaluate"):
            after(RunLog, "_show", self._in_phase)
        elif self.point == "line":
            after(MetricsFile, "log", self._in_line)
        elif self.point == "rewind":
            _half("write_text", "metrics.jsonl.partial")
        elif self.point == "pushed":
            after(RolloutClient, "push", lambda _, run, version, *rest: version == self.iteration + 1 and die())
        elif self.point == "report":
            replace(run, "write_report", die)
        else:
            save = checkpoints.save

            def doomed(folder: Path, version: int, *rest: Any) -> Path:
                last = version >= self.iteration + 1  # or the next version that is saved
                if last and self.point in FILES:
                    _half(*FILES[self.point])
                elif last and self.point == "rename":
                    replace(Path, "rename", die)
                saved = save(folder, version, *rest)
                return die() if last else saved

            replace(checkpoints, "save", doomed)

    def _in_phase(self, _: Any, iteration: int, name: str) -> None:
        if (iteration, name) == (self.iteration, self.point):
            timer = threading.Timer(self.delay, die)
            timer.daemon = True
            timer.start()

    def _in_line(self, metrics: Any, event: str, **values: Any) -> None:
        if event == "iteration" and values["iteration"] == self.iteration:
            os.truncate(metrics._path, metrics._path.stat().st_size - 40)
            die()


def _half(method: str, name: str) -> None:
    """Die when half of a file of this name is written by a method of Path."""
    write = getattr(Path, method)

    def half(path: Path, data: Any, *rest: Any, **options: Any) -> int:
        if path.name == name:
            write(path, data[: len(data) // 2], *rest, **options)
            die()
        return int(write(path, data, *rest, **options))

    replace(Path, method, half)
