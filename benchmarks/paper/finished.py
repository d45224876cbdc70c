"""Finished runs: one small JSON file each, with all that the tables need. Folders are merged by copying files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from solrl_trainer.settings.config import RunConfig

from paper.experiments import OWN_SETTINGS, Experiment
from paper.intervals import Values

FINISHED = "finished"
DIGITS = 7

PLACEMENT = ("optimizer.checkpointing", "regenerate.share", "regenerate.selection")
"""Settings of stored runs that did not say what a run computed; presets lack them now, or have other ones."""


class MixedRunsError(ValueError):
    """Finished runs that must not stand in one table."""


@dataclass(frozen=True)
class Finished:
    """A finished run.

    Attributes:
        name: name of its experiment.
        machine: device and torch.
        jobs: runs at a time, over all GPUs.
        prompts: held-out prompts.
        before, after: reward → its mean per held-out prompt [prompts], of the base and of the averaged weights. `after`
            is empty if the run stopped at a loss or gradient that is not finite.
        within: reward → the base's standard deviation among the images of a prompt.
        curve: (iterations, reward → mean over the held-out images), the base first.
        iterations: lines of metrics.jsonl.
        fidelity: rank fidelity of exploration, lines of metrics.jsonl.
        seconds: seconds by phase.
        stopped: why the run stopped early, or None.
        words: engine → what it reads in the first image of each held-out prompt, "before" and "after"; empty until
            `paper.words` has read them.
    """

    name: str
    machine: str
    jobs: int
    config: RunConfig
    prompts: list[str]
    before: Mapping[str, Values]
    after: Mapping[str, Values]
    within: Mapping[str, float]
    curve: list[tuple[int, Mapping[str, float]]]
    iterations: list[dict[str, Any]]
    fidelity: list[dict[str, Any]]
    seconds: Mapping[str, float]
    stopped: str | None = None
    words: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)

    def gain(self, reward: str) -> Values:
        """Gain per prompt [prompts], in standard deviations of the base within a prompt."""
        return (self.after[reward] - self.before[reward]) / self.within[reward]


Runs = Mapping[str, Finished]
"""Finished runs by the name of their experiment."""


def record(experiment: Experiment, **values: Any) -> dict[str, Any]:
    """Content of a finished run's file; `values` are the attributes of `Finished` except its name."""
    scores = {when: {name: _rounded(row) for name, row in values[when].items()} for when in ("before", "after")}
    return {
        "preset": experiment.preset,
        "settings": list(experiment.settings),
        "seed": experiment.seed,
        **values,
        **scores,
        "config": values["config"].model_dump(mode="json", exclude=set(OWN_SETTINGS)),
    }


def _rounded(row: Iterable[float]) -> list[float]:
    return [round(float(value), DIGITS) for value in row]


def file_of(experiment: Experiment, folder: Path) -> Path:
    """File of a finished run."""
    return folder / FINISHED / f"{experiment.name}.json"


def read_finished(experiments: Sequence[Experiment], folder: Path) -> dict[str, Finished]:
    """The finished ones of these runs.

    Raises:
        MixedRunsError: those with one set of prompts are of different machines, or were judged on different prompts of
            it, or one has settings that its preset does not have any more.
    """
    found = {one.name: _read(one, file_of(one, folder)) for one in experiments if file_of(one, folder).is_file()}
    for prompts in {str(run.config.prompts) for run in found.values()}:
        _require_alike([run for run in found.values() if str(run.config.prompts) == prompts], folder)
    return found


def _require_alike(runs: Sequence[Finished], folder: Path) -> None:
    machines = sorted({run.machine for run in runs})
    if len(machines) > 1:
        raise MixedRunsError(
            f"{folder} has runs of {len(machines)} machines: {'; '.join(machines)}; expected one, because rounding "
            "differs between them: use another --runs, or delete the runs of one"
        )
    if len({tuple(run.prompts) for run in runs if run.prompts}) > 1:
        raise MixedRunsError(
            f"the runs in {folder} were judged on different prompts; expected the same: use another --runs"
        )


def _read(experiment: Experiment, path: Path) -> Finished:
    content = json.loads(path.read_text())
    _require_settings(experiment, content["config"], path)
    values = {name: content[name] for name in Finished.__dataclass_fields__ if name in content and name != "config"}
    values |= {
        when: {name: np.array(row, dtype=np.float64) for name, row in content[when].items()}
        for when in ("before", "after")
    }
    values["curve"] = [(int(version), means) for version, means in content["curve"]]
    return Finished(name=experiment.name, config=experiment.config, **values)


def _require_settings(experiment: Experiment, stored: Mapping[str, Any], path: Path) -> None:
    """Refuse a run whose settings the preset does not give any more; settings that were added since are allowed."""
    now = experiment.config.model_dump(mode="json", exclude=set(OWN_SETTINGS))
    differing = sorted(
        f"{section}.{key}" if key else section
        for section, value in stored.items()
        for key in (value if isinstance(value, dict) and isinstance(now.get(section), dict) else [""])
        if f"{section}.{key}" not in PLACEMENT and _at(stored, section, key) != _at(now, section, key)
    )
    if differing:
        raise MixedRunsError(
            f"{path} was run with other values of {', '.join(differing)} than {experiment.preset} has now; "
            "delete it, or use another --runs"
        )


def _at(settings: Mapping[str, Any], section: str, key: str) -> Any:
    value = settings.get(section)
    return value.get(key) if key and isinstance(value, dict) else value
