"""Table 7: long runs, and the time in which each family reaches shares of the baseline's plateau."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from support.results import table

from paper.experiments import Experiment
from paper.finished import Finished
from paper.intervals import Values, over_seeds
from paper.tables.common import Context, Section, as_json, cell, gain, gain_text, rate_text, signed
from paper.tables.families import BASELINE, BF16, FAMILIES, OURS, costs
from paper.tables.pace import SpeedUp, best, curve, log_ratios, pooled

TITLE = "7. Plateaus"
REWARDS = ("pickscore", "imagereward")
SEEDS = (1, 2, 3, 4)
ITERATIONS = 250
CHANGES = {"iterations": ITERATIONS, "optimizer.cosine_iterations": ITERATIONS, "evaluate.every": 10}
SHARES = (0.5, 0.7, 0.9, 0.95, 0.99)
COMPARED = (BF16, OURS)


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """The long runs of three families, and the trials that choose their learning rate."""
    recipes = [FAMILIES[name] for name in (BASELINE, *COMPARED)]
    return _seeded(context).after_trials(recipes, [(reward, CHANGES) for reward in rewards(context)], whole=whole)


def rewards(context: Context) -> list[str]:
    """Trained rewards of the table, which judge every run of the programme."""
    return [reward for reward in REWARDS if reward in context.programme.rewards]


def section(context: Context) -> Section | None:
    """The table; None before all of its runs are finished."""
    seeded, prices = _seeded(context), costs(context)
    families = (BASELINE, *COMPARED)
    every = [_runs(seeded, name, reward) for name in families for reward in rewards(context)]
    if not all(len(seeded.finished(runs)) == len(SEEDS) for runs in every):
        return None
    rows, data = [], {}
    for reward in rewards(context):
        for name in families:
            runs = _runs(seeded, name, reward)
            finished = seeded.finished(runs)
            highest = over_seeds(np.array([_rise(run, reward) for run in finished])) if finished else None
            at = f"{np.mean([_peak(run, reward) for run in finished]):.0f}" if finished else ""
            rows.append([name, reward, cell(seeded, runs, highest), at, gain_text(seeded, runs, reward)])
            data[f"{name}, {reward}"] = {"best": as_json(highest), "end": as_json(gain(seeded, runs, reward))}
    pace = {name: {share: _pace(seeded, name, share) for share in SHARES} for name in COMPARED}
    compute = {
        f"{name}, {clock}": {share: one.over(price) for share, one in pace[name].items()}
        for name in COMPARED
        for clock, price in prices[name].items()
    }
    below = over_seeds(_bests(seeded, OURS) - _bests(seeded, BF16))
    shares = [f"{share:.0%}" for share in SHARES]
    lines = [
        *rate_text(context),
        f"{ITERATIONS} iterations, {len(SEEDS)} seeds; the learning rate falls to 0 along half a cosine. Gains in",
        "standard deviations of the base. Best: the highest of a run's evaluations, and the mean iteration that has",
        "it. End: the averaged weights after the last iteration.",
        "",
        *table(["family", "trained on", "best, sd", "at iteration", "end, sd"], rows),
        "",
        f"Best of Sol-RL less that of {BF16}, over all rewards: {signed(below)}.",
        "",
        f"× iterations and × compute, over all rewards, to a share of the plateau: the best gain of {BASELINE} with",
        "the same seed. Its iterations, over those of the family. Compute as in table 2.",
        "",
        *table(["× iterations", *shares], [[name, *map(str, found.values())] for name, found in pace.items()]),
        "",
        *table(["× compute", *shares], [[name, *map(str, found.values())] for name, found in compute.items()]),
    ]
    return Section(
        TITLE,
        lines,
        {
            "gains": data,
            "best less BF16": as_json(below),
            "curves": {
                f"{name}, {reward}": _mean_curve(seeded.finished(_runs(seeded, name, reward)), reward)
                for reward in rewards(context)
                for name in families
            },
            "iterations": {name: _json(found) for name, found in pace.items()},
            "compute": {name: _json(found) for name, found in compute.items()},
        },
    )


def _seeded(context: Context) -> Context:
    return replace(context, programme=replace(context.programme, seeds=SEEDS))


def _runs(seeded: Context, family: str, reward: str) -> list[Experiment]:
    return seeded.tuned.over_seeds(FAMILIES[family], CHANGES, reward=reward)


def _bests(seeded: Context, family: str) -> Values:
    """Best gain of a family's runs [seeds], averaged over rewards."""
    rises = [
        [_rise(run, reward) for run in seeded.finished(_runs(seeded, family, reward))] for reward in rewards(seeded)
    ]
    return np.mean(rises, axis=0)


def _rise(run: Finished, reward: str) -> float:
    points = curve(run, reward)
    return (best(points) - points[0][1]) / run.within[reward]


def _mean_curve(runs: Sequence[Finished], reward: str) -> list[tuple[int, float, float, float]]:
    """Iteration and gain, a mean over seeds with the limits of its interval, by evaluation."""
    versions = [version for version, _ in curve(runs[0], reward)]
    gains = np.array([[value for _, value in curve(run, reward)] for run in runs])
    found = map(over_seeds, ((gains - gains[:, :1]) / [[run.within[reward]] for run in runs]).T)
    return [(version, one.mean, one.low, one.high) for version, one in zip(versions, found, strict=True)]


def _peak(run: Finished, reward: str) -> int:
    points = curve(run, reward)
    return next(version for version, value in points if value == best(points))


def _pace(seeded: Context, family: str, share: float) -> SpeedUp:
    return pooled(
        [
            log_ratios(
                seeded, _runs(seeded, family, reward), _runs(seeded, BASELINE, reward), reward, share, height=best
            )
            for reward in rewards(seeded)
        ]
    )


def _json(found: dict[float, SpeedUp]) -> dict[str, Any]:
    return {f"{share:.0%}": as_json(one.ratio) for share, one in found.items()}
