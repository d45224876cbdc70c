"""`metrics.jsonl`: one JSON object per line, appended during a run; `event` names its kind."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from solrl_trainer.run_folder.output_files import replace_file, writing


class MetricsFile:
    """Appends to a run's metrics file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def log(self, event: str, **values: Any) -> dict[str, Any]:
        """Append one line, flushed; returns it."""
        line = {"event": event, "time": time.time(), **values}
        text = json.dumps(line, allow_nan=False)
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        return line

    def rewind(self, version: int) -> None:
        """Drop lines beyond the checkpoint of `version`, where the run continues."""
        if self._path.is_file():
            lines = read_metrics(self._path)
            remaining = [line for line in lines if line["version"] <= version and line["event"] != "result"]
            # An attempt that left no checkpoint noted its changes at this version.
            remaining = [line for line in remaining if (line["event"], line["version"]) != ("change", version)]
            replace_file(self._path, "".join(json.dumps(line) + "\n" for line in remaining))

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """All lines, or all of one kind."""
        lines = read_metrics(self._path) if self._path.is_file() else []
        return [line for line in lines if event in (None, line["event"])]

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, over all iterations, and of measurements and in total until the newest line."""
        total: dict[str, float] = {}
        for line in self.lines():
            for phase, seconds in line.get("seconds", {}).items():
                total[phase] = total.get(phase, 0.0) + seconds
            total |= line.get("elapsed", {})
        return total


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file, except an incomplete last line after a crash, or zeros in its place after a power cut.

    A ValueError names the file and a damaged line; later, when a reader asks a line for a field that it lacks, the
    field, too. An OSError says why the file cannot be read.
    """
    # Decoded line by line: a damaged byte must not hide its line.
    *complete, last = path.read_bytes().split(b"\n")
    lines = [_parsed(path, number, text) for number, text in enumerate(complete, start=1)]
    with suppress(ValueError):
        lines.append(_parsed(path, len(lines) + 1, last))
    return lines


class _Line(dict[str, Any]):
    def __init__(self, line: Mapping[str, Any], place: str) -> None:
        super().__init__(line)
        self._place = place

    def __missing__(self, key: str) -> Any:
        raise _damaged(self._place, f"the event {self['event']!r} without {key!r}")


def _damaged(place: str, got: str) -> ValueError:
    return ValueError(
        f"{place}: got {got}; expected a JSON object with an event, a version and the event's fields. Restore the "
        "file, or delete this line, whose figures are then missing"
    )


def _parsed(path: Path, number: int, text: bytes) -> dict[str, Any]:
    place = f"{path}:{number}"
    with suppress(ValueError):  # neither JSON nor UTF-8
        line = json.loads(text)
        if isinstance(line, dict) and isinstance(line.get("event"), str) and isinstance(line.get("version"), int):
            return _Line(line, place)
    raise _damaged(place, repr(text[:80].decode(errors="replace")))


def own_time(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds by phase that add up to the trainer's time: concurrent exploration counts only as "wait"."""
    return {phase: value for phase, value in seconds.items() if phase != "explore" or "wait" not in seconds}
