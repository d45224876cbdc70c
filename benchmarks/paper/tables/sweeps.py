"""Table 4: size of the group, samples kept, steps, plan and lag of exploration, one varied at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from support.results import table

from paper.experiments import Experiment, fitted_plan
from paper.finished import Finished
from paper.intervals import Estimate
from paper.published import HPSV2_BY_CANDIDATES, HPSV2_BY_STEPS
from paper.tables.common import (
    NOT_RUN,
    Context,
    Section,
    as_json,
    cell,
    difference,
    gain,
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
    return {"explore.lag": lag, "explore.source": "service"} if lag else {}


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
        **{f"{n} candidates, {side} a side": group(n, side) for n in CANDIDATES for side in SIDES},
        **{f"{steps} steps": {"explore.steps": steps} for steps in STEPS},
        **plans(context),
        **{f"lag {lag}": lagging(lag) for lag in LAGS},
    }


def section(context: Context) -> Section:
    """The tables."""
    reward = context.programme.reward
    grid = [
        [str(candidates), *(_gain(context, group(candidates, side)) for side in SIDES), _published(candidates)]
        for candidates in CANDIDATES
    ]
    apart = [
        [str(candidates), *(_difference(context, group(candidates, side)) for side in SIDES)]
        for candidates in CANDIDATES
    ]
    lines = [
        *rate_text(context),
        f"Sol-RL on {reward}, {context.programme.iterations} iterations; gains in standard deviations of the base.",
        "Candidates N against samples kept on each side; the paper's column is its HPSv2 with 12.",
        "",
        *table(["N", *(f"{side} a side" for side in SIDES), "paper"], grid),
        "",
        f"All differences are to the usual setting, {USUAL} candidates with {max(SIDES)} a side, 6 Euler steps, no",
        "pruning and no lag; they are paired by seed and prompt.",
        "",
        *table(["N, difference", *(f"{side} a side" for side in SIDES)], apart),
        "",
        *_matches(context),
        "",
        *table(
            ["Euler steps", "gain, sd", "difference", "paper (HPSv2)"],
            [
                [str(steps), *_against_usual(context, {"explore.steps": steps}), _one(HPSV2_BY_STEPS.get(steps))]
                for steps in STEPS
            ],
        ),
        "",
        *table(
            ["plan", "gain, sd", "difference"],
            [[name, *_against_usual(context, changes)] for name, changes in plans(context).items()],
        ),
        "",
        *table(["lag", "gain, sd", "difference"], [[str(lag), *_against_usual(context, lagging(lag))] for lag in LAGS]),
    ]
    if len(plans(context)) < 3:
        lines += ["", f"Fitted steps: {NOT_RUN}; plan_fidelity.json has none for {context.programme.model}."]
    every = settings(context)
    gains = {name: as_json(gain(context, sol_rl(context, one), reward)) for name, one in every.items()}
    differences = {
        name: as_json(less_usual(context, one)) for name, one in every.items() if not _is_usual(context, one)
    }
    return Section(TITLE, lines, {"gains": gains, "differences": differences})


def _gain(context: Context, changes: Changes) -> str:
    runs = sol_rl(context, changes)
    return cell(context, runs, gain(context, runs, context.programme.reward))


def _against_usual(context: Context, changes: Changes) -> tuple[str, str]:
    """The gain, and its difference to the usual setting's; no difference for the usual setting itself."""
    return _gain(context, changes), _difference(context, changes)


def _difference(context: Context, changes: Changes) -> str:
    return "" if _is_usual(context, changes) else signed(less_usual(context, changes))


def _is_usual(context: Context, changes: Changes) -> bool:
    return sol_rl(context, changes) == sol_rl(context, {})


def less_usual(context: Context, changes: Changes) -> Estimate | None:
    """Difference of the gain to the usual setting's, paired by seed and prompt; None without runs."""
    return difference(context, sol_rl(context, changes), sol_rl(context, {}), context.programme.reward)


def _published(candidates: int) -> str:
    return _one(HPSV2_BY_CANDIDATES.get(candidates))


def _one(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _matches(context: Context) -> list[str]:
    """Measured and predicted match rates by size of the group."""
    usual = context.finished(sol_rl(context, group(USUAL, max(SIDES))))
    spearman = np.mean([line["spearman"] for line in map(at_start, usual) if line]) if usual else None
    said = NOT_RUN if spearman is None else f"{spearman:.3f}"
    rows = [
        [str(candidates), *(_match(context, candidates, side, spearman) for side in SIDES)] for candidates in CANDIDATES
    ]
    return [
        "Share of the true best and worst of a group that exploration selects, before training: measured, and",
        f"predicted by a Gaussian model from the Spearman correlation at N = {USUAL} ({said}). The paper's own formula",
        "was not checked. It reports 96.9, 95.0 and 93.3 % for 4, 8 and 12 of 96, by a measure that is not plain",
        "overlap.",
        "",
        *table(["N", *(f"{side} a side" for side in SIDES)], rows),
    ]


def _match(context: Context, candidates: int, side: int, spearman: Any) -> str:
    measured = measured_match(context.finished(sol_rl(context, group(candidates, side))), side)
    first = NOT_RUN if measured is None else f"{measured:.1%}"
    return first if spearman is None else f"{first}, {match_rate(float(spearman), candidates, side):.1%}"


def measured_match(runs: Sequence[Finished], side: int) -> float | None:
    """Mean overlap of the selected best and worst with the true ones, before training; None without a measurement."""
    found = [
        line[ends][str(side)] for run in runs if (line := at_start(run)) for ends in ("top_overlap", "bottom_overlap")
    ]
    return float(np.mean(found)) if found else None


def at_start(run: Finished) -> dict[str, Any] | None:
    """Rank fidelity of exploration before training."""
    return next((line for line in run.fidelity if line["version"] == 0), None)
