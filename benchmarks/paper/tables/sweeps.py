"""Table 4: size of the group, samples kept, steps, plan and lag of exploration, one varied at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paper.arms import Arm, Context
from paper.experiments import SERVICE, Changes, fitted_plan
from paper.figures import Figure, Table
from paper.intervals import Estimate, over_seeds_and_prompts, pooled_differences
from paper.published import HPSV2_BY_CANDIDATES, HPSV2_BY_STEPS
from paper.theory import match_rate

CANDIDATES = (24, 48, 72, 96, 192)
SIDES = (4, 8, 12)
STEPS = (2, 3, 4, 6, 8)
LAGS = (0, 1, 2, 4)


def sized(candidates: int, side: int) -> str:
    """Name of the setting with a group of this size, with `side` best and as many worst kept."""
    return f"{candidates} candidates, {side} a side"


USUAL = sized(96, 12)


def plans(model: str) -> dict[str, Changes]:
    """Other plans than six steps; fitted ones only for models that have stored fitted steps."""
    exploring: dict[str, Changes] = {"6 steps": {}}
    if fitted := fitted_plan(model):
        exploring[f"{fitted['explore.steps']} fitted steps"] = fitted
    return exploring


def arms(context: Context) -> dict[str, Arm]:
    """Sol-RL by setting. Only a service explores ahead."""
    settings: dict[str, Changes] = {
        **{sized(n, side): {"explore.candidates": n, "explore.keep": 2 * side} for n in CANDIDATES for side in SIDES},
        **{f"{steps} steps": {"explore.steps": steps} for steps in STEPS},
        **plans(context.programme.model),
        **{f"lag {lag}": {"explore.lag": lag, "rollout_url": SERVICE} if lag else {} for lag in LAGS},
    }
    return {name: context.arm("sol_rl", changes) for name, changes in settings.items()}


def figures(context: Context) -> dict[str, Any]:
    """The tables."""
    found = arms(context)
    usual = found[USUAL]
    others = {name: arm for name, arm in found.items() if arm.experiments != usual.experiments}
    apart = pooled_differences(
        {name: arm.apart(usual) for name, arm in others.items() if arm.complete and usual.complete}
    )

    def gain(name: str) -> Figure:
        return found[name].gain_of_ceiling()

    def difference(name: str) -> Figure | str:
        one = apart.get(name)
        return Figure(one, bold=one is not None and one.clear) if name in others else ""

    def by_size(cell: Callable[[str], Any]) -> dict[str, dict[str, Any]]:
        return {str(n): {f"{side} a side": cell(sized(n, side)) for side in SIDES} for n in CANDIDATES}

    def one_by_one(head: str, names: Mapping[str, str]) -> Table:
        cells = {key: {"gain, sd": gain(name), "difference": difference(name)} for key, name in names.items()}
        return Table([head], cells)

    sizes, steps = by_size(gain), one_by_one("Euler steps", {str(n): f"{n} steps" for n in STEPS})
    for table, head, published in (
        (sizes, "paper", HPSV2_BY_CANDIDATES),
        (steps.rows, "paper (HPSv2)", HPSV2_BY_STEPS),
    ):
        for n, row in table.items():
            row[head] = Figure(published[int(n)], ".4f") if int(n) in published else ""
    ranks = usual.ranks().get(0)
    spearman = float(np.mean(ranks)) if ranks else None
    matches = {
        sized(n, side): (measured_match(found[sized(n, side)], side), spearman and match_rate(spearman, n, side))
        for n in CANDIDATES
        for side in SIDES
    }
    return {
        "sizes": Table(["N"], sizes),
        "differences": apart,
        "by size": Table(["N, difference"], by_size(difference)),
        "per doubling": {name: Figure(one) for name, one in slopes(found).items()},
        "Spearman": Figure(spearman, ".3f"),
        "matches": Table(["N"], by_size(lambda name: tuple(Figure(rate, ".1%") for rate in matches[name]))),
        "steps": steps,
        "plans": one_by_one("plan", {name: name for name in plans(context.programme.model)}),
        "lags": one_by_one("lag", {str(lag): f"lag {lag}" for lag in LAGS}),
    }


def slopes(found: Mapping[str, Arm]) -> dict[str, Estimate]:
    """Gain per doubling of the candidates, by samples kept and over all; {} until all groups are finished."""
    groups = {side: [found[sized(n, side)] for n in CANDIDATES] for side in SIDES}
    if not all(arm.complete for one in groups.values() for arm in one):
        return {}
    doublings = np.log2(CANDIDATES) - np.log2(CANDIDATES).mean()
    weights = doublings / (doublings**2).sum()
    slopes = {
        f"{side} a side": np.tensordot(weights, [arm.gains(arm.reward) for arm in one], 1)
        for side, one in groups.items()
    }
    slopes["mean of all"] = np.mean(list(slopes.values()), axis=0)
    return {name: over_seeds_and_prompts(one) for name, one in slopes.items()}


def measured_match(arm: Arm, side: int) -> float | None:
    """Mean overlap of the selected best and worst with the true ones, before training; None without a measurement."""
    starts = [line for run in arm.runs for line in run.fidelity if not line["version"]]
    found = [line[ends][str(side)] for line in starts for ends in ("top_overlap", "bottom_overlap")]
    return float(np.mean(found)) if found else None
