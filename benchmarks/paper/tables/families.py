"""Table 2: the four rollout families, their learning curves, and the compute at which each reaches 24-in-24."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from support.results import table

from paper.compute import SHAPES, Passes, costs_of, passes_of_iteration
from paper.experiments import Experiment
from paper.finished import Finished
from paper.intervals import Estimate, over_seeds
from paper.published import SPEED_UP
from paper.tables.common import (
    NOT_RUN,
    Context,
    Section,
    as_json,
    cell,
    difference,
    final,
    gain,
    rate_text,
    signed,
)

TITLE = "2. Rollout families"
FAMILIES = {
    "24-in-24 BF16": "diffusionnft",
    "24-in-96 BF16": "naive_scaling",
    "24-in-96 naive quant": "naive_quant",
    "Sol-RL": "sol_rl",
}
BASELINE = "24-in-24 BF16"
Clock = Callable[[Finished], float]
"""Compute of one iteration of a run."""


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """Every family in every part at the same learning rate, and the trials that choose it."""
    return context.after_trials(FAMILIES.values(), parts(context).values(), whole=whole)


def parts(context: Context) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Parts of the table: trained reward and changes by name. Weights that were not prepared have one reward."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {reward: (reward, {}) for reward in rewards(context)}
    programme = context.programme
    if programme.unprepared is not None:
        found[f"{programme.reward}, {programme.unprepared}"] = (programme.reward, {"model": programme.unprepared})
    return found


def rewards(context: Context) -> tuple[str, ...]:
    """Trained rewards of the table, that of the other tables first."""
    return tuple(dict.fromkeys((context.programme.reward, *context.programme.rewards)))


def section(context: Context) -> Section:
    """The table."""
    programme = context.tuned
    clocks = clocks_of(context)
    rows, data = [], {}
    for part, (reward, changes) in parts(context).items():
        baseline = programme.over_seeds(FAMILIES[BASELINE], changes, reward=reward)
        for name, recipe in FAMILIES.items():
            runs = programme.over_seeds(recipe, changes, reward=reward)
            own = gain(context, runs, reward)
            against = difference(context, runs, baseline, reward)
            speed = {clock: speed_up(context, runs, baseline, of, reward) for clock, of in clocks.items()}
            said = "" if name == BASELINE else signed(against)
            found = [final(context, runs, reward), cell(context, runs, own), said, *map(times, speed.values())]
            rows.append([part, name, *found])
            data[f"{part}, {name}"] = {
                "gain": as_json(own),
                "speed_up": {clock: as_json(one) for clock, (one, _) in speed.items()},
            }
    head = ["reward", "family", "final", "gain, sd", f"less {BASELINE}", *(f"× {clock}" for clock in clocks)]
    low, high = SPEED_UP
    lines = [
        *rate_text(context),
        f"Trained for {programme.iterations} iterations. ×: compute that {BASELINE} needs to",
        "reach its own final reward, over the compute that the family needs to reach that reward, with its interval",
        f"over seeds; evaluations are every {programme.every} iterations, with straight lines between them. Denoising:",
        "passes weighted by their times at a large model's shape. Seconds: as measured on this device, where NVFP4 is",
        "emulated.",
        f"The paper: {low:g} to {high:g} × in time.",
        "",
        *table(head, rows),
    ]
    return Section(TITLE, lines, {"families": data})


def clocks_of(context: Context) -> dict[str, Clock]:
    """Measures of compute by name."""
    clocks: dict[str, Clock] = {}
    for shape, name in SHAPES.items():
        costs = costs_of(shape, context.results)
        short = name.partition(" ")[0]
        clocks[f"denoising, {short}"] = _weighted(costs.generating)
        clocks[f"with training, {short}"] = _weighted(costs.seconds)
    return clocks | {"seconds": measured_seconds}


def _weighted(seconds: Callable[[Passes], float]) -> Clock:
    return lambda run: seconds(passes_of_iteration(run.config))


def measured_seconds(run: Finished) -> float:
    """Measured seconds of an iteration, without evaluations."""
    spent = sum(run.seconds.get(phase, 0.0) for phase in ("explore", "regenerate", "train", "push"))
    return spent / max(1, len(run.iterations))


def first_reached(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Iterations after which a learning curve first reaches `target`, linear between evaluations; None if never."""
    for (before, low), (after, high) in pairwise(curve):
        if low >= target:
            return float(before)
        if high >= target:
            return before + (after - before) * (target - low) / (high - low)
    return None


def speed_up(
    context: Context, ours: Sequence[Experiment], baseline: Sequence[Experiment], clock: Clock, reward: str
) -> tuple[Estimate | None, str]:
    """Compute of the baseline over ours at the baseline's final reward, a geometric mean over seeds.

    Returns:
        The estimate over the seeds that reach it, and a note if some do not; None if no seed has both runs finished,
        none reaches it, or a baseline did not rise.
    """
    logs, runs, flat = [], 0, 0
    for one, other in zip(ours, baseline, strict=True):
        mine, theirs = context.finished([one]), context.finished([other])
        if not mine or not theirs:
            continue
        runs += 1
        target = curve(theirs[0], reward)[-1][1]
        spent, needed = (first_reached(curve(run, reward), target) for run in (theirs[0], mine[0]))
        flat += not spent
        if spent and needed:
            logs.append(np.log(spent * clock(theirs[0]) / (needed * clock(mine[0]))))
    if flat:
        return None, f"{BASELINE} did not rise in {flat} of {runs} runs"
    note = f"reached in {len(logs)} of {runs} runs" if len(logs) < runs else ""
    if not logs:
        return None, note
    found = over_seeds(np.array(logs))
    return Estimate(*(float(np.exp(value)) for value in (found.mean, found.low, found.high)), found.seeds), note


def curve(run: Finished, reward: str) -> list[tuple[int, float]]:
    """Held-out reward by iterations."""
    return [(version, means[reward]) for version, means in run.curve]


def times(found: tuple[Estimate | None, str]) -> str:
    """A speed-up in words."""
    estimate, note = found
    if estimate is None:
        return note or NOT_RUN
    limits = f" [{estimate.low:.2f}, {estimate.high:.2f}]" if estimate.seeds > 1 else " [one seed]"
    return f"{estimate.mean:.2f}{limits}{f', {note}' if note else ''}"
