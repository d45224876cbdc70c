"""Table 8: FlowGRPO and DanceGRPO as their authors' code trains, with the same tuning and compute as in table 1."""

from support.results import table

from paper.experiments import Experiment
from paper.tables.algorithms import ALGORITHMS, OURS, runs_of
from paper.tables.common import NOT_RUN, Context, Section, as_json, difference, gain, gain_text, signed
from paper.tuning import choose, trials

TITLE = "8. FlowGRPO and DanceGRPO by their authors' settings"
NAMES = ("DanceGRPO", "FlowGRPO")
SETTINGS = {"algorithm.recompute": False, "optimizer.updates": 6}
"""Log-probabilities are kept from sampling, and an iteration has six optimiser steps."""


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """The trials of both, and their runs once a learning rate is chosen; `whole`: in any case."""
    programme, found = context.programme, list[Experiment]()
    for name in NAMES:
        found += trials(programme, ALGORITHMS[name], context.results, SETTINGS).values()
        for reward in programme.rewards:
            found += runs_of(context, name, reward, whole=whole, settings=SETTINGS) or []
    return found


def section(context: Context) -> Section | None:
    """The table; None before a learning rate is chosen."""
    programme = context.programme
    choices = {name: choose(programme, ALGORITHMS[name], context.runs, context.results, SETTINGS) for name in NAMES}
    if not any(choices.values()):
        return None
    rows, data = [], {}
    for name in NAMES:
        for reward in programme.rewards:
            runs = runs_of(context, name, reward, settings=SETTINGS)
            ours, usual = (runs_of(context, other, reward) for other in (OURS, name))
            apart = [difference(context, one, runs, reward) if one and runs else None for one in (ours, usual)]
            if None in apart:
                rows.append([name, reward, *[NOT_RUN] * 3])
                continue
            rows.append([name, reward, gain_text(context, runs, reward), *map(signed, apart)])
            data[f"{name}, {reward}"] = {
                "gain": as_json(gain(context, runs, reward)),
                "sol_rl": as_json(apart[0]),
                "usual": as_json(apart[1]),
            }
    rates = ", ".join(f"{name} {choice.rate:g}" for name, choice in choices.items() if choice)
    lines = [
        "Log-probabilities are kept from sampling instead of computed again, and each iteration has six steps",
        f"of the optimiser instead of two. Learning rates, chosen as in table 1: {rates}. Gains in standard",
        "deviations of the base.",
        "",
        *table(["algorithm", "trained on", "gain, sd", f"{OURS} less it", "table 1's less it"], rows),
    ]
    return Section(TITLE, lines, {"gains": data})
