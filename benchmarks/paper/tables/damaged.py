"""Table 11: training on samples that are visibly damaged, because NVFP4 has layers that its list leaves out."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from solrl_core.families.load import locate
from support.results import table

from paper.experiments import Experiment
from paper.intervals import over_seeds
from paper.tables.common import TUNED_FOR, Context, Section, as_json, difference, gain, rate_text, signed
from paper.tables.quantised import BASELINE, FAMILIES, REFERENCE, fall, first_scores
from paper.tuning import trials

TITLE = "11. Training on visibly damaged samples"
NAIVE, OURS = "naive quant", "Sol-RL"
MODEL = "mini-sana"
KEPT: Mapping[str, Sequence[str]] = {"every layer": (), "all but the timestep embedder": ("timestep_embedder",)}
"""Layers in NVFP4, with patterns of those that are not."""
SEEDS = (1, 2, 3, 4, 5)
LESS_SMALL, FALL = "less 24-in-24 BF16", "fall from its best, sd"
CHANGES = {"evaluate.fidelity_floor": 0}
"""By default, a run refuses to explore with such ranks."""


def damaged_model(layers: str) -> str:
    """Folder of the miniature with these layers in NVFP4."""
    return f"runs/damaged/{layers.replace(' ', '-')}"


def write_damaged_models() -> None:
    """Write those folders: the weights that are shipped, with other lists."""
    source = Path(locate(MODEL))
    options = json.loads((source / "solrl.json").read_text(encoding="utf-8").replace('"../', f'"{source.parent}/'))
    for layers, keep in KEPT.items():
        folder = Path(damaged_model(layers))
        if folder.is_dir():
            continue
        partial = folder.with_suffix(".partial")
        shutil.copytree(source, partial, dirs_exist_ok=True)
        list_of_them = {"quantize": ["."], "keep": list(keep)}
        (partial / "solrl.json").write_text(json.dumps(options | list_of_them, indent=1), encoding="utf-8")
        partial.rename(folder)


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """Every family with every list, and the trials that choose the learning rate."""
    found = list(trials(context.programme, TUNED_FOR, context.results).values())
    if context.choice or whole:
        found += [one for layers in KEPT for name in FAMILIES for one in runs_of(context, layers, name)]
    return list(dict.fromkeys(found))


def runs_of(context: Context, layers: str, name: str) -> list[Experiment]:
    """Runs of a family. BF16 quantises nothing, so its runs are those of the shipped weights."""
    programme = replace(context.tuned, model=MODEL, seeds=SEEDS)
    changes = {} if name == REFERENCE else {"model": damaged_model(layers), **CHANGES}
    return programme.over_seeds(FAMILIES[name], changes)


def _small(context: Context) -> list[Experiment]:
    """Runs of 24-in-24 in BF16, as far as other tables have them."""
    return replace(context.tuned, seeds=SEEDS).over_seeds(BASELINE)


def section(context: Context) -> Section | None:
    """The table; None before a run of Sol-RL is finished."""
    rows, data = [], dict[str, Any]()
    for layers in KEPT:
        if not context.finished(runs_of(context, layers, OURS)):
            continue
        for name in FAMILIES:
            if context.finished(runs_of(context, layers, name)):
                cells, data[f"{layers}, {name}"] = _row(context, layers, name)
                rows.append([layers, name, *cells])
    if not rows:
        return None
    judges = [f"gain in {judge}, sd" for judge in context.programme.judges]
    head = [
        "in NVFP4",
        "family",
        "samples, sd",
        "Spearman",
        "gain, sd",
        f"less {NAIVE}",
        f"less {OURS}",
        LESS_SMALL,
        FALL,
        *judges,
    ]
    lines = [
        *rate_text(context),
        f"{MODEL} trained on {context.programme.reward} for {context.programme.iterations} iterations.",
        f"Samples: mean score of the first iteration's candidates, less that of {REFERENCE}'s, with its interval over",
        "seeds. Spearman: of the candidates' ranks with those of BF16 at full steps, before training. 24-in-24 BF16",
        f"has {len(context.finished(_small(context)))} of these seeds. Fall: as in table 3.",
        "",
        *table(head, rows),
    ]
    return Section(TITLE, lines, {"families": data})


def _row(context: Context, layers: str, name: str) -> tuple[list[str], dict[str, Any]]:
    """Cells and figures of a family."""
    reward, runs = context.programme.reward, runs_of(context, layers, name)
    gains = {
        "gain": gain(context, runs, reward),
        **{
            f"less {other}": None
            if name == other
            else difference(context, runs, runs_of(context, layers, other), reward)
            for other in (NAIVE, OURS)
        },
        LESS_SMALL: difference(context, runs, _small(context), reward),
        FALL: over_seeds(np.array([fall(run, reward) for run in context.finished(runs)])),
        **{judge: gain(context, runs, judge) for judge in context.programme.judges},
    }
    apart = first_scores(context, runs, runs_of(context, layers, REFERENCE), reward)
    samples = over_seeds(apart) if len(apart) and name != REFERENCE else None
    ranks = [run.fidelity[0]["spearman"] for run in context.finished(runs) if run.fidelity and name != REFERENCE]
    spearman = float(np.mean(ranks)) if ranks else None
    cells = ["" if samples is None else signed(samples), "" if spearman is None else f"{spearman:.2f}"]
    cells += [signed(one) if one else "" for one in gains.values()]
    figures = {key: as_json(one) for key, one in gains.items()}
    return cells, figures | {"samples": as_json(samples), "spearman": spearman}
