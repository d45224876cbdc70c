"""Table 12: what ranks and the size of a group buy, against a Gaussian model. Fewer steps make the ranks worse."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from paper.arms import Arm, Context
from paper.figures import Figure, Table
from paper.pace import pace, prices
from paper.tables.families import BASELINE, BF16, FAMILIES, OURS
from paper.theory import signal

SHARES = (0.5, 0.7, 0.9)
"""Targets of the speed-up, as shares of the baseline's final gain."""
FITTED = 0.7
"""Target at which the prediction is judged."""
Setting = tuple[int, int, int]
"""Candidates of a group, samples kept on each side, and Euler steps of exploring, which decide the ranks."""
SETTINGS = [
    (candidates, side, steps)
    for candidates in (24, 96, 384)
    for side in (4, 12)
    for steps in (2, 3, 6)
    if candidates > 2 * side or steps == 6
]
"""A group of 24 with 12 a side is trained whole, whatever its ranks."""
BASE = (24, 12, 6)
"""The setting whose samples are those of 24-in-24, though explored first."""
CONTROLS = {
    "8-in-8 BF16": (FAMILIES[BASELINE], {"explore.candidates": 8, "explore.keep": 8}),
    "8-in-24 BF16": (FAMILIES[BF16], {"explore.candidates": 24, "explore.keep": 8}),
}
"""Recipe and changes of runs that tell a smaller batch from selection."""


def arms(context: Context) -> dict[Setting | str, Arm]:
    """Sol-RL by setting, the controls and 24-in-24 by name."""
    found: dict[Setting | str, Arm] = {BASELINE: context.arm(FAMILIES[BASELINE])}
    for candidates, side, steps in SETTINGS:
        changes = {"explore.candidates": candidates, "explore.keep": 2 * side, "explore.steps": steps}
        # By default, a run refuses to explore with the ranks of two steps.
        floor = {"evaluate.fidelity_floor": 0} if steps == 2 else {}
        found[candidates, side, steps] = context.arm(FAMILIES[OURS], changes | floor)
    return found | {name: context.arm(recipe, changes) for name, (recipe, changes) in CONTROLS.items()}


def figures(context: Context) -> dict[str, Any]:
    """The table."""
    found = arms(context)
    costs = {clock: one for clock, one in prices(found, BASELINE).items() if clock.startswith("FLUX.1")}
    paces = {
        key: {share: pace([arm], [found[BASELINE]], share) for share in SHARES}
        for key, arm in found.items()
        if key != BASELINE
    }

    def iterations(key: Setting | str, shares: Sequence[float]) -> dict[str, Figure]:
        return {f"× iterations, {share:.0%}": paces[key][share] for share in shares}

    def compute(key: Setting | str, shares: Sequence[float]) -> dict[str, Figure]:
        return {
            f"× compute, {share:.0%}, {clock}": paces[key][share].over(one[key])
            for share in shares
            for clock, one in costs.items()
        }

    rows, fits = {}, {}
    apart: dict[int, list[tuple[float, float]]] = {}
    for setting in SETTINGS:
        candidates, side, _ = setting
        ranks = found[setting].ranks()
        start, along = (float(np.mean(one)) for one in (ranks[0], list(chain.from_iterable(ranks.values()))))
        predicted = 1.0 if setting == BASE else signal(along, candidates, side) / signal(1.0, *BASE[:2])
        rows[tuple(map(str, setting))] = {
            "Spearman": (Figure(start, ".2f"), Figure(along, ".2f")),
            "gain, sd": found[setting].gain_of_ceiling(),
            **iterations(setting, SHARES),
            "predicted": Figure(predicted, ".2f"),
            **compute(setting, SHARES[-1:]),
        }
        if measured := paces[setting][FITTED].value:
            apart.setdefault(side, []).append((math.log(measured.mean / predicted), math.log(measured.mean)))
    for side, logs in apart.items():
        means = np.mean(logs, axis=0)
        error, constant = np.exp(np.abs(logs - means).mean(0)) - 1
        fits[str(side)] = {
            "settings": len(logs),
            "measured / predicted": Figure(float(np.exp(means[0])), ".2f"),
            "error": Figure(float(error), ".0%"),
            "error of a constant": Figure(float(constant), ".0%"),
        }
    controls = {
        name: {
            "gain, sd": found[key].gain_of_ceiling(),
            **iterations(key, SHARES[-2:]),
            **compute(key, SHARES[-2:]),
        }
        for name, key in {**{name: name for name in CONTROLS}, f"{OURS}, 8 of 24": (24, 4, 6)}.items()
    }
    return {
        "settings": Table(["N", "a side", "steps"], rows),
        "controls": Table(["samples"], controls),
        "fits": Table(["a side"], fits),
    }
