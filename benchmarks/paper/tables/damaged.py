"""Table 11: training on samples that are visibly damaged, because every linear layer is in NVFP4."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from solrl_core.families.load import locate
from support.results import table

from paper.experiments import Experiment
from paper.intervals import over_seeds
from paper.tables.common import Context, Section, as_json, cell, difference, gain, signed
from paper.tables.quantised import FAMILIES, REFERENCE, first_scores

TITLE = "11. Training on visibly damaged samples"
NAIVE, OURS = "naive quant", "Sol-RL"


def damaged_model(model: str) -> str:
    """Folder of a miniature whose layers, those that its list keeps in BF16 too, are all quantised."""
    return f"runs/every-layer/{model}"


def write_damaged_model(model: str) -> None:
    """Write that folder: the weights that are shipped, with another list."""
    source, folder = Path(locate(model)), Path(damaged_model(model))
    if folder.is_dir():
        return
    partial = folder.with_suffix(".partial")
    shutil.copytree(source, partial, dirs_exist_ok=True)
    options = (source / "solrl.json").read_text(encoding="utf-8").replace('"../', f'"{source.parent}/')
    list_of_all = {"quantize": ["."], "keep": []}
    (partial / "solrl.json").write_text(json.dumps(json.loads(options) | list_of_all, indent=1), encoding="utf-8")
    partial.rename(folder)


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """Every family at the presets' learning rate, Sol-RL and naive quantisation first."""
    return [one for name in reversed(FAMILIES) for one in _runs(context, name)]


def section(context: Context) -> Section | None:
    """The table; None before a run of Sol-RL is finished."""
    reward = context.programme.reward
    if not context.finished(_runs(context, OURS)):
        return None
    rows, data = [], dict[str, Any]()
    for name in FAMILIES:
        runs = _runs(context, name)
        figures = {
            "gain": gain(context, runs, reward),
            "less naive": None if name == NAIVE else difference(context, runs, _runs(context, NAIVE), reward),
            **{judge: gain(context, runs, judge) for judge in context.programme.judges},
        }
        if figures["gain"] is None:
            continue
        apart = first_scores(context, runs, _runs(context, REFERENCE), reward)
        samples = over_seeds(apart) if len(apart) and name != REFERENCE else None
        ranks = [run.fidelity[0]["spearman"] for run in context.finished(runs) if run.fidelity]
        shown = [cell(context, runs, one) if one else "" for one in figures.values()]
        rows.append(
            [name, "" if name == REFERENCE else signed(samples), f"{np.mean(ranks):.2f}" if ranks else "", *shown]
        )
        data[name] = {key: as_json(one) for key, one in figures.items()} | {
            "samples": as_json(samples),
            "spearman": float(np.mean(ranks)) if ranks else None,
        }
    judges = [f"gain in {judge}, sd" for judge in context.programme.judges]
    lines = [
        f"{context.programme.model} with every linear layer in NVFP4, trained on {reward} for",
        f"{context.programme.iterations} iterations at the preset's learning rate. Samples: mean score of the first",
        f"iteration's candidates, less that of {REFERENCE}'s, with its interval over seeds. Spearman: of the",
        "candidates' ranks with those of BF16 at full steps, before training.",
        "",
        *table(["family", "samples, sd", "Spearman", "gain, sd", f"less {NAIVE}", *judges], rows),
    ]
    return Section(TITLE, lines, {"families": data})


def _runs(context: Context, name: str) -> Sequence[Experiment]:
    programme = context.programme
    return programme.over_seeds(FAMILIES[name], {"model": damaged_model(programme.model)})
