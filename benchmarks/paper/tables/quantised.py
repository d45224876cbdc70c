"""Tables 3 and 11: whether training on quantised samples degrades, also in long runs, on weights that were not prepared
for NVFP4, and on samples that are visibly damaged because NVFP4 has layers that its list leaves out."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from solrl_core.families.load import locate

from paper.arms import Arm, Context, averaged, fall, paired
from paper.experiments import Changes
from paper.figures import Figure, Table
from paper.intervals import Values, over_seeds, over_seeds_and_prompts
from paper.pace import pace
from paper.tables import families

FAMILIES = {"24-in-96 BF16": "naive_scaling", "naive quant": "naive_quant", "Sol-RL": "sol_rl"}
BF16, NAIVE, OURS = FAMILIES
MODEL = "mini-sana"
KEPT: Mapping[str, Sequence[str]] = {"every layer": (), "all but the timestep embedder": ("timestep_embedder",)}
"""Layers in NVFP4 of a damaged model, with patterns of those that are not."""
DAMAGED_SEEDS = (1, 2, 3, 4, 5)

Arms = dict[tuple[str, str], Arm]


def arms(context: Context) -> Arms:
    """Arm by weights and length, and by family."""
    programme = context.programme
    parts: dict[str, Changes] = {
        f"{programme.model}, {programme.iterations} iterations": {},
        f"{programme.model}, {programme.long} iterations": {"iterations": programme.long},
    }
    if programme.unprepared:
        parts[f"{programme.unprepared}, {programme.iterations} iterations"] = {"model": programme.unprepared}
    return {
        (part, name): context.arm(recipe, changes)
        for part, changes in parts.items()
        for name, recipe in FAMILIES.items()
    }


def figures(context: Context) -> dict[str, Any]:
    """Table 3."""
    found = arms(context)
    ranks = {part: arm.ranks() for (part, name), arm in found.items() if name == OURS}
    versions = sorted(set().union(*ranks.values()))
    along = {
        part: {
            str(version): Figure(over_seeds(np.array(one[version])), ".2f") if version in one else ""
            for version in versions
        }
        for part, one in ranks.items()
        if versions
    }
    rows = {
        (part, name): {
            "gain, sd": arm.gain_of_ceiling(),
            f"less {BF16}": "" if name == BF16 else arm.less(found[part, BF16]),
            **_fall_and_judges(arm),
        }
        for (part, name), arm in found.items()
    }
    keys = ["weights, length"]
    return {
        "gains": Table([*keys, "family"], rows),
        "damage": Table(["reward"], _damage(context)),
        "ranks": Table(keys, along),
    }


def _fall_and_judges(arm: Arm) -> dict[str, Any]:
    judges = {f"gain in {judge}, sd": arm.gain(judge) for judge in arm.context.programme.judges}
    return {"fall from its best, sd": arm.each(fall), **judges}


def _damage(context: Context) -> dict[str, dict[str, Any]]:
    """Scores of rounded samples of the base, and naive quantisation against Sol-RL, by part of table 2 and over all."""
    found = families.arms(context)
    parts = {part: [part] for part, _ in found} | {
        f"mean of all, {context.programme.model}": list(context.programme.rewards)
    }
    rows = {}
    for label, pooled in parts.items():
        goals, bf16, naive, ours = ([found[part, name] for part in pooled] for name in families.FAMILIES)
        samples = averaged([first_scores(*both) for both in zip(naive, bf16, strict=True)])
        ahead = averaged([one.apart(other) for one, other in zip(naive, ours, strict=True)])
        rows[label] = {
            "samples, sd": Figure(None if samples is None else over_seeds(samples)),
            "gain less Sol-RL's, sd": Figure(None if ahead is None else over_seeds_and_prompts(ahead)),
            "× iterations of Sol-RL": pace(naive, ours, goals=goals),
        }
    return rows


def first_scores(rounded: Arm, exact: Arm) -> Values:
    """Mean score of the candidates of the first iteration less that of exact ones, by seed that has both [seeds]."""
    found = [
        (one.iterations[0]["proxy_mean"] - two.iterations[0]["proxy_mean"]) / one.within[rounded.reward]
        for one, two in paired(rounded, exact)
    ]
    return np.array(found)


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


def damaged_arms(context: Context) -> Arms:
    """Arm by layers and family. BF16 quantises nothing, so its runs are those of the shipped weights."""
    # By default, a run refuses to explore with such ranks.
    changes = {layers: {"model": damaged_model(layers), "evaluate.fidelity_floor": 0} for layers in KEPT}
    return {
        (layers, name): context.arm(recipe, {} if name == BF16 else changes[layers], seeds=DAMAGED_SEEDS)
        for layers in KEPT
        for name, recipe in FAMILIES.items()
    }


def damaged(context: Context) -> dict[str, Any]:
    """Table 11, beside the runs of 24-in-24 that table 2 has."""
    found, small = damaged_arms(context), context.arm(families.FAMILIES[families.BASELINE])

    def row(layers: str, name: str) -> dict[str, Any]:
        arm, ranks = found[layers, name], found[layers, name].ranks().get(0)
        quantised = name != BF16
        return {
            "samples, sd": Figure(over_seeds(first_scores(arm, found[layers, BF16]))) if quantised else "",
            "Spearman": Figure(float(np.mean(ranks)) if ranks else None, ".2f") if quantised else "",
            "gain, sd": arm.gain(),
            **{f"less {other}": "" if name == other else arm.less(found[layers, other]) for other in (NAIVE, OURS)},
            f"less {families.BASELINE}": arm.less(small),
            **_fall_and_judges(arm),
        }

    return {"gains": Table(["in NVFP4", "family"], {key: row(*key) for key in found}), "small": len(small.experiments)}
