"""Invented finished runs for tests of the paper's tables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from paper.__main__ import missing, read
from paper.arms import Context
from paper.experiments import Experiment, Programme
from paper.finished import file_of, record
from paper.tuning import USUAL, trials

PROMPTS = 12
MACHINE = "a machine"
TINY: dict[str, Any] = {
    "explore.prompts": 2,
    "explore.candidates": 6,
    "explore.keep": 4,
    "iterations": 2,
    "optimizer.updates": 1,
    "lora.rank": 2,
    "checkpoint_every": 1,
    "evaluate.every": 1,
    "evaluate.prompts": 3,
    "evaluate.seeds": 2,
    "evaluate.steps": 2,
    "evaluate.fidelity_prompts": 0,
}
"""Settings of a run that takes seconds."""


def finish(experiment: Experiment, folder: Path, gain: float, **changes: Any) -> None:
    """Write the file of a run that gains this many standard deviations in each reward, by a straight learning curve."""
    config, noise = experiment.config, np.random.default_rng(experiment.seed + 1)
    names = [experiment.reward, *config.evaluate.rewards]
    before = {name: np.full(PROMPTS, 0.5) for name in names}
    after = {name: 0.5 + 0.1 * (gain + 0.1 * noise.standard_normal(PROMPTS)) for name in names}
    ends = [*range(0, config.iterations, 5), config.iterations]
    values: dict[str, Any] = {
        "machine": MACHINE,
        "jobs": 1,
        "config": config,
        "prompts": [f'"{number}" in red' for number in range(PROMPTS)],
        "before": before,
        "after": after,
        "within": dict.fromkeys(names, 0.1),
        "curve": [(at, dict.fromkeys(names, 0.5 + 0.1 * gain * at / config.iterations)) for at in ends],
        "iterations": [
            {"version": at + 1, "proxy_mean": gain, "loss": 2.0, "grad_norm": 0.1, "seconds": {"explore": 2.0}}
            for at in range(8)
        ],
        "fidelity": [],
        "stopped": None,
    }
    path = file_of(experiment.name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record(experiment, **(values | changes))))


def context_of(programme: Programme, folder: Path) -> Context:
    """The finished runs in a folder."""
    return read(programme, folder)


def finish_trials(programme: Programme, folder: Path, best: float = 3e-4) -> Context:
    """Finish the trials of the usual learning rate; returns the context at the best one."""
    for rate, one in trials(programme, USUAL).items():
        finish(one, folder, float(rate == best))
    return context_of(programme, folder)


def finish_all(programme: Programme, folder: Path, table: str) -> Context:
    """Finish all runs of a table; learning rates are tuned on the way."""
    while begin := missing(context := context_of(programme, folder), [table]):
        for one in begin:
            finish(one, folder, 0.5)
    return context
