"""Table 12: what ranks and the size of a group buy, against a Gaussian model. Fewer steps make the ranks worse."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from support.results import table

from paper.experiments import Experiment
from paper.tables.common import Context, Section, as_json, ceiling_text, gain, gain_text, rate_text
from paper.tables.families import BASELINE, BF16, FAMILIES, OURS
from paper.tables.pace import Clock, clocks_of, log_ratios, speed_up
from paper.theory import signal

TITLE = "12. What ranks buy"
SHARES = (0.5, 0.7, 0.9)
"""Targets of the speed-up, as shares of the baseline's final gain."""
FITTED = 0.7
"""Target at which the prediction is judged."""
JUDGED = (FITTED, SHARES[-1])
"""Targets of the controls."""


class Setting(NamedTuple):
    """Candidates of a group, samples kept on each side, and Euler steps of exploring, which decide the ranks."""

    candidates: int
    side: int
    steps: int


SETTINGS = [
    Setting(candidates, side, steps)
    for candidates in (24, 96, 384)
    for side in (4, 12)
    for steps in (2, 3, 6)
    if candidates > 2 * side or steps == 6
]
"""A group of 24 with 12 a side is trained whole, whatever its ranks."""
BASE = Setting(24, 12, 6)
"""The setting whose samples are those of 24-in-24, though explored first."""
CONTROLS = {
    "8-in-8 BF16": (FAMILIES[BASELINE], {"explore.candidates": 8, "explore.keep": 8}),
    "8-in-24 BF16": (FAMILIES[BF16], {"explore.candidates": 24, "explore.keep": 8}),
}
"""Recipe and changes of runs that tell a smaller batch from selection."""


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """Every setting and 24-in-24 in BF16, and the trials that choose their learning rate; the largest groups first."""
    found = context.after_trials([FAMILIES[BASELINE]], [(None, {})], whole=whole)
    if context.choice or whole:
        found += [one for setting in reversed(SETTINGS) for one in runs_of(context, setting)]
        found += [one for recipe, changes in CONTROLS.values() for one in context.tuned.over_seeds(recipe, changes)]
    return found


def runs_of(context: Context, setting: Setting) -> list[Experiment]:
    """Sol-RL in this setting, one run for each seed."""
    candidates, side, steps = setting
    changes = {"explore.candidates": candidates, "explore.keep": 2 * side, "explore.steps": steps}
    # By default, a run refuses to explore with the ranks of two steps.
    return context.tuned.over_seeds(FAMILIES[OURS], changes | ({"evaluate.fidelity_floor": 0} if steps == 2 else {}))


def section(context: Context) -> Section | None:
    """The table; None before every setting has a finished run."""
    if not all(context.finished(runs_of(context, setting)) for setting in SETTINGS):
        return None
    reward, baseline = context.programme.reward, context.tuned.over_seeds(FAMILIES[BASELINE])
    exact = signal(1.0, BASE.candidates, BASE.side)
    clocks = {name: clock for name, clock in clocks_of(context).items() if name.startswith("FLUX.1")}
    rows, data = [], {}
    both: dict[int, list[tuple[float, float]]] = {}
    for setting in SETTINGS:
        runs = runs_of(context, setting)
        start, along = _spearman(context, runs)
        pace = {share: speed_up(log_ratios(context, runs, baseline, reward, share)) for share in SHARES}
        predicted = 1.0 if setting == BASE else signal(along, setting.candidates, setting.side) / exact
        costs = {name: clock(runs[0].config) / clock(baseline[0].config) for name, clock in clocks.items()}
        rows.append(
            [
                *map(str, setting),
                f"{start:.2f}, {along:.2f}",
                gain_text(context, runs, reward),
                *map(str, pace.values()),
                f"{predicted:.2f}",
                *(str(pace[SHARES[-1]].over(cost)) for cost in costs.values()),
            ]
        )
        data[" ".join(map(str, setting))] = {
            "spearman": [start, along],
            "gain": as_json(gain(context, runs, reward)),
            "iterations": {f"{share:.0%}": as_json(one.ratio) for share, one in pace.items()},
            "predicted": predicted,
            "compute": {name: as_json(pace[SHARES[-1]].over(cost).ratio) for name, cost in costs.items()},
        }
        if measured := pace[FITTED].ratio:
            both.setdefault(setting.side, []).append((measured.mean, predicted))
    fits = {side: _fit(found) for side, found in both.items()}
    controls, compute = _controls(context, baseline, clocks)
    lines = [
        *rate_text(context),
        f"{OURS} on {reward}, {context.programme.iterations} iterations. Fewer steps of exploring make its ranks worse",
        "on purpose. Spearman: of the candidates' ranks with those of BF16 at full steps, before training and as a",
        f"mean along the run. × iterations: those of {BASELINE} to a share of its final gain, over those of the",
        "setting. Predicted: the ratio of the signals of a sample in a Gaussian model, with the ranks along the run.",
        *ceiling_text(context, [reward]),
        "",
        *table(
            [
                *("N", "a side", "steps", "Spearman", "gain, sd"),
                *(f"× iterations, {share:.0%}" for share in SHARES),
                "predicted",
                *(f"× compute, {SHARES[-1]:.0%}, {name}" for name in clocks),
            ],
            rows,
        ),
        "",
        "Compute counts passes as in table 2.",
        "",
        "A group of 8 samples is also a smaller batch. Alone (8-in-8), and with ranks in BF16 at all steps (8-in-24):",
        "",
        *table(
            [
                *("samples", "gain, sd"),
                *(f"× iterations, {share:.0%}" for share in JUDGED),
                *(f"× compute, {share:.0%}, {name}" for share in JUDGED for name in clocks),
            ],
            controls,
        ),
        "",
        f"Measured over predicted × iterations at {FITTED:.0%}: geometric mean over the settings, and the mean",
        "error that is left.",
        "",
        *table(
            ["a side", "settings", "measured / predicted", "error"],
            [
                [str(side), str(one["settings"]), f"{one['ratio']:.2f}", f"{one['error']:.0%}"]
                for side, one in fits.items()
            ],
        ),
    ]
    return Section(TITLE, lines, {"settings": data, "controls": compute, "fits": fits})


def _controls(
    context: Context, baseline: Sequence[Experiment], clocks: Mapping[str, Clock]
) -> tuple[list[list[str]], dict[str, Any]]:
    """Rows and figures of the controls, and of Sol-RL with as many candidates and samples."""
    reward = context.programme.reward
    named = {name: context.tuned.over_seeds(recipe, changes) for name, (recipe, changes) in CONTROLS.items()}
    named[f"{OURS}, 8 of 24"] = runs_of(context, Setting(24, 4, 6))
    rows, data = [], {}
    for name, runs in named.items():
        costs = {clock: price(runs[0].config) / price(baseline[0].config) for clock, price in clocks.items()}
        paces = {share: speed_up(log_ratios(context, runs, baseline, reward, share)) for share in JUDGED}
        compute = [str(pace.over(cost)) for pace in paces.values() for cost in costs.values()]
        rows.append([name, gain_text(context, runs, reward), *map(str, paces.values()), *compute])
        data[name] = {
            f"{share:.0%}": {clock: as_json(pace.over(cost).ratio) for clock, cost in costs.items()}
            for share, pace in paces.items()
        }
    return rows, data


def _fit(both: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Measured against predicted ratios."""
    measured, predicted = np.log(both).T
    apart = measured - predicted
    return {
        "settings": len(both),
        "ratio": float(np.exp(apart.mean())),
        "error": float(np.exp(np.abs(apart - apart.mean()).mean()) - 1),
    }


def _spearman(context: Context, runs: Sequence[Experiment]) -> tuple[float, float]:
    """Rank correlation before training, and its mean along the run."""
    lines = [line for run in context.finished(runs) for line in run.fidelity]
    start = [line["spearman"] for line in lines if not line["version"]]
    return float(np.mean(start)), float(np.mean([line["spearman"] for line in lines]))
