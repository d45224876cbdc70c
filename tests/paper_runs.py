"""Invented finished runs for tests of the paper's tables."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from paper.arms import Context
from paper.experiments import Experiment, Programme
from paper.figures import as_json
from paper.finished import file_of, record
from paper.tables import TABLES
from paper.tuning import USUAL, trials

PROMPTS = 12
MACHINE = "a machine"


def finish(experiment: Experiment, folder: Path, gain: float, **changes: Any) -> None:
    """Write the file of a run that gains this many standard deviations in each reward, by a straight learning curve."""
    config, noise = experiment.config, np.random.default_rng(experiment.seed + 1)
    names = [experiment.reward, *config.evaluate.rewards]
    before = {name: np.full(PROMPTS, 0.5) for name in names}
    after = {name: 0.5 + 0.1 * (gain + 0.1 * noise.standard_normal(PROMPTS)) for name in names}
    ends = [*range(0, config.iterations, 5), config.iterations]
    line = {"version": 0, "spearman": 0.8, **{ends: {"4": 0.7, "8": 0.75, "12": 0.8} for ends in _ENDS}}
    values: dict[str, Any] = {
        "machine": MACHINE,
        "jobs": 1,
        "config": config,
        "prompts": [f'"{number}" in red' for number in range(PROMPTS)],
        "before": before,
        "after": after,
        "within": dict.fromkeys(names, 0.1),
        "curve": [(at, dict.fromkeys(names, 0.5 + 0.1 * gain * at / config.iterations)) for at in ends],
        "iterations": [{"version": at + 1, "proxy_mean": gain, "seconds": {"explore": 2.0}} for at in range(8)],
        "fidelity": [line],
        "seconds": {"explore": 16.0, "train": 4.0, "evaluate": 3.0},
        "stopped": None,
    }
    path = file_of(experiment.name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record(experiment, **(values | changes))))


_ENDS = ("top_overlap", "bottom_overlap")


def context_of(programme: Programme, folder: Path) -> Context:
    """The finished runs in a folder."""
    from paper.__main__ import read

    return read(programme, folder)


def finish_trials(programme: Programme, folder: Path, best: float = 3e-4) -> Context:
    """Finish the trials of the usual learning rate; returns the context at the best one."""
    for rate, one in trials(programme, USUAL).items():
        finish(one, folder, float(rate == best))
    return context_of(programme, folder)


def figures_of(context: Context, table: str) -> dict[str, Any] | None:
    """The figures of a table as JSON, if the page has it."""
    entry = TABLES[table]
    return json.loads(json.dumps(entry.figures(context), default=as_json)) if entry.stands(context) else None


def finish_all(programme: Programme, folder: Path, gains: Mapping[str, float], table: str, **changes: Any) -> Context:
    """Finish all runs of a table, those of a recipe with its gain; learning rates are tuned on the way."""
    from paper.__main__ import missing

    while True:
        context = context_of(programme, folder)
        begin = missing(context, [table])
        if not begin:
            return context
        for one in begin:
            finish(one, folder, gains[one.preset.split("/")[1]], **changes)
