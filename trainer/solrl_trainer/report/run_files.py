"""The files of a run's folder, as the report reads them. A run in progress, or an older one, lacks some."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solrl_proto.text_files import read_json

from solrl_trainer.records.metrics_file import read_metrics


@dataclass(frozen=True)
class RunFiles:
    """A run's settings, result and metrics.

    Attributes:
        folder: of the run.
        config, result: content of config.json and result.json; None without.
        lines: all lines of metrics.jsonl.
    """

    folder: Path
    config: dict[str, Any] | None
    result: dict[str, Any] | None
    lines: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "RunFiles":
        """Read a folder.

        Raises:
            FileNotFoundError: it contains no run.
        """
        metrics = folder / "metrics.jsonl"
        if not any((folder / name).is_file() for name in ("metrics.jsonl", "result.json", "config.json")):
            raise FileNotFoundError(f"{folder} contains no run (no metrics.jsonl, result.json or config.json)")
        config, result = _read(folder / "config.json"), _read(folder / "result.json")
        return cls(folder, config, result, read_metrics(metrics) if metrics.is_file() else [])

    @property
    def facts(self) -> dict[str, Any]:
        """Result or settings, which both name run, model and preset."""
        return self.result or self.config or {}

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.facts.get("run", self.folder.name))

    @property
    def iterations(self) -> list[dict[str, Any]]:
        """The line of each iteration, with the seconds of its push."""
        seconds = {line["version"]: line["seconds"] for line in self.latest("push")}
        return [
            line | {"seconds": line["seconds"] | seconds.get(line["version"], {})} for line in self.latest("iteration")
        ]

    def latest(self, event: str) -> list[dict[str, Any]]:
        """Last line of each version, in order; a resumed run logs its first evaluation again."""
        found = {line["version"]: line for line in self.lines if line["event"] == event}
        return [found[version] for version in sorted(found)]

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the trained rewards."""
        found = self.result["trained"] if self.result else (self.config or {}).get("rewards", {})
        return {name: weight for name, weight in found.items() if weight}

    @property
    def prompts(self) -> int:
        """Number of held-out prompts of the result; 0 without."""
        return int(self.result["prompts"]) if self.result else 0


def served_text(iterations: Sequence[dict[str, Any]]) -> str:
    """Precisions that actually explored."""
    kinds = {(line["precision"], line["numerics"]) for line in iterations}
    return " and ".join(sorted(f"{precision.upper()} ({numerics})" for precision, numerics in kinds))


def mean_shares(iterations: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean share of each reward in the spread of the weighted sum; none for a single reward."""
    lines = [line["shares"] for line in iterations if "shares" in line]
    return {name: sum(line[name] for line in lines) / len(lines) for name in lines[0]} if lines else {}


def setting_text(value: Any) -> str:
    """A setting as YAML has it, without quotes; lists are separated by commas."""
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    content: dict[str, Any] = read_json(path)
    return content
