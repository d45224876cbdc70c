"""Table 4: size of the group, samples kept, steps, plan and lag of exploration, one varied at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from support.results import table

from paper.experiments import SERVICE, Experiment, fitted_plan
from paper.finished import Finished
from paper.intervals import Estimate, Tested, over_seeds_and_prompts, pooled_differences
from paper.published import HPSV2_BY_CANDIDATES, HPSV2_BY_STEPS
from paper.tables.common import (
    NOT_RUN,
    Context,
    Section,
    as_json,
    ceiling_text,
    gain,
    gain_text,
    gains,
    pairs,
    rate_text,
    signed,
)
from paper.theory import match_rate

TITLE = "4. What exploration needs"
CANDIDATES = (24, 48, 72, 96, 192)
SIDES = (4, 8, 12)
STEPS = (2, 3, 4, 6, 8)
LAGS = (0, 1, 2, 4)
USUAL = 96
Changes = Mapping[str, Any]


def group(candidates: int, side: int) -> Changes:
    """A group of this size, with `side` best and as many worst kept."""
    return {"explore.candidates": candidates, "explore.keep": 2 * side}


def lagging(lag: int) -> Changes:
    """Exploration this many versions behind; only a service explores ahead."""
    return {"explore.lag": lag, "rollout_url": SERVICE} if lag else {}


def plans(context: Context) -> dict[str, Changes]:
    """Other plans than six steps; fitted ones only for models that have stored fitted steps."""
    found: dict[str, Changes] = {"6 steps": {}, "6 steps, after 4 keep 48": {"explore.prune": {"after": 4, "keep": 48}}}
    if fitted := fitted_plan(context.programme.model, context.results):
        last = fitted["explore.steps"] - 1
        name = f"{last + 1} fitted steps"
        found[name] = fitted
        found[f"{name}, after {last} keep 48"] = {**fitted, "explore.prune": {"after": last, "keep": 48}}
    return found


def sol_rl(context: Context, changes: Changes) -> list[Experiment]:
    """Sol-RL with these changes, one run for each seed."""
    return context.tuned.over_seeds("sol_rl", changes)


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """All sweeps, with one run for each seed of the usual setting, and the trials that choose their learning rate."""
    return context.after_trials(["sol_rl"], [(None, one) for one in settings(context).values()], whole=whole)


def settings(context: Context) -> dict[str, Changes]:
    """All settings by name."""
    return {
        **{sized(n, side): group(n, side) for n in CANDIDATES for side in SIDES},
        **{f"{steps} steps": {"explore.steps": steps} for steps in STEPS},
        **plans(context),
        **{f"lag {lag}": lagging(lag) for lag in LAGS},
    }


def section(context: Context) -> Section:
    """The tables."""
    reward, every, apart = context.programme.reward, settings(context), less_usual(context)

    def own(name: str) -> str:
        return gain_text(context, sol_rl(context, every[name]), reward)

    def both(name: str) -> tuple[str, str]:
        return own(name), _difference(context, name, apart)

    trends = slopes(context)
    lines = [
        *rate_text(context),
        f"Sol-RL on {reward}, {context.programme.iterations} iterations; gains in standard deviations of the base.",
        *ceiling_text(context, [reward]),
        "Candidates N against samples kept on each side; the paper's column is its HPSv2 with 12.",
        "",
        *table(
            ["N", *(f"{side} a side" for side in SIDES), "paper"],
            [[str(n), *(own(sized(n, side)) for side in SIDES), _one(HPSV2_BY_CANDIDATES.get(n))] for n in CANDIDATES],
        ),
        "",
        f"All differences are to the usual setting, {USUAL} candidates with {max(SIDES)} a side, 6 Euler steps, no",
        "pruning and no lag; they are paired by seed and prompt. Their intervals have one variance, pooled over all",
        f"{len(apart)} differences of this table. Bold: differs from 0 after Holm's correction for as many.",
        "",
        *table(
            ["N, difference", *(f"{side} a side" for side in SIDES)],
            [[str(n), *(_difference(context, sized(n, side), apart) for side in SIDES)] for n in CANDIDATES],
        ),
        "",
        "Gain per doubling of N, by a straight line over its logarithm:",
        "",
        *table(list(trends) or [NOT_RUN], [[signed(one) for one in trends.values()]]),
        "",
        *_matches(context),
        "",
        *table(
            ["Euler steps", "gain, sd", "difference", "paper (HPSv2)"],
            [[str(n), *both(f"{n} steps"), _one(HPSV2_BY_STEPS.get(n))] for n in STEPS],
        ),
        "",
        *table(["plan", "gain, sd", "difference"], [[name, *both(name)] for name in plans(context)]),
        "",
        *table(["lag", "gain, sd", "difference"], [[str(lag), *both(f"lag {lag}")] for lag in LAGS]),
    ]
    if len(plans(context)) < 3:
        lines += ["", f"Fitted steps: {NOT_RUN}; plan_fidelity.json has none for {context.programme.model}."]
    figures = {
        "gains": {name: as_json(gain(context, sol_rl(context, one), reward)) for name, one in every.items()},
        "differences": {name: {**(as_json(one.estimate) or {}), "p": one.p} for name, one in apart.items()},
        "per doubling": {name: as_json(one) for name, one in trends.items()},
        "matches": _match_rates(context),
    }
    return Section(TITLE, lines, figures)


def sized(candidates: int, side: int) -> str:
    """Name of the setting with a group of this size."""
    return f"{candidates} candidates, {side} a side"


def _difference(context: Context, name: str, apart: Mapping[str, Tested]) -> str:
    if _is_usual(context, settings(context)[name]):
        return ""
    if name not in apart:
        return NOT_RUN
    said = signed(apart[name].estimate)
    return f"**{said}**" if apart[name].clear else said


def _is_usual(context: Context, changes: Changes) -> bool:
    return sol_rl(context, changes) == sol_rl(context, {})


def less_usual(context: Context) -> dict[str, Tested]:
    """Differences of the gain to the usual setting's, paired by seed and prompt, of the settings with all seeds."""
    reward, usual = context.programme.reward, sol_rl(context, {})
    found = {
        name: both[0] - both[1]
        for name, changes in settings(context).items()
        if not _is_usual(context, changes) and (both := pairs(context, sol_rl(context, changes), usual, reward))
    }
    return pooled_differences({name: one for name, one in found.items() if len(one) == len(usual)})


def slopes(context: Context) -> dict[str, Estimate]:
    """Gain per doubling of the candidates, by samples kept and over all; {} until all groups are finished."""
    runs = {
        side: [context.finished(sol_rl(context, group(candidates, side))) for candidates in CANDIDATES]
        for side in SIDES
    }
    if any(len(one) < len(context.programme.seeds) for found in runs.values() for one in found):
        return {}
    doublings = np.log2(CANDIDATES) - np.log2(CANDIDATES).mean()
    weights = doublings / (doublings**2).sum()
    found = {
        f"{side} a side": np.tensordot(weights, [gains(one, context.programme.reward) for one in sized], 1)
        for side, sized in runs.items()
    }
    found["mean of all"] = np.mean(list(found.values()), axis=0)
    return {name: over_seeds_and_prompts(one) for name, one in found.items()}


def _one(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _matches(context: Context) -> list[str]:
    """Measured and predicted match rates by size of the group."""
    spearman, rates = _spearman(context), _match_rates(context)
    said = NOT_RUN if spearman is None else f"{spearman:.3f}"
    cells = {
        name: ", ".join(NOT_RUN if rate is None else f"{rate:.1%}" for rate in found) for name, found in rates.items()
    }
    return [
        "Share of the true best and worst of a group that exploration selects, before training: measured, and",
        f"predicted by a Gaussian model from the Spearman correlation at N = {USUAL} ({said}). The paper's own formula",
        "was not checked. It reports 96.9, 95.0 and 93.3 % for 4, 8 and 12 of 96, by a measure that is not plain",
        "overlap.",
        "",
        *table(
            ["N", *(f"{side} a side" for side in SIDES)],
            [[str(n), *(cells[sized(n, side)] for side in SIDES)] for n in CANDIDATES],
        ),
    ]


def _spearman(context: Context) -> float | None:
    usual = context.finished(sol_rl(context, group(USUAL, max(SIDES))))
    found = [line["spearman"] for line in map(at_start, usual) if line]
    return float(np.mean(found)) if found else None


def _match_rates(context: Context) -> dict[str, tuple[float | None, float | None]]:
    """Match rates by setting: measured and predicted."""
    spearman = _spearman(context)
    return {
        sized(n, side): (
            measured_match(context.finished(sol_rl(context, group(n, side))), side),
            None if spearman is None else match_rate(spearman, n, side),
        )
        for n in CANDIDATES
        for side in SIDES
    }


def measured_match(runs: Sequence[Finished], side: int) -> float | None:
    """Mean overlap of the selected best and worst with the true ones, before training; None without a measurement."""
    found = [
        line[ends][str(side)] for run in runs if (line := at_start(run)) for ends in ("top_overlap", "bottom_overlap")
    ]
    return float(np.mean(found)) if found else None


def at_start(run: Finished) -> dict[str, Any] | None:
    """Rank fidelity of exploration before training."""
    return next((line for line in run.fidelity if line["version"] == 0), None)
