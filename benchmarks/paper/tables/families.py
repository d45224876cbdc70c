"""Table 2: the four rollout families, their learning curves, and how soon each reaches the reward of 24-in-24."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from paper.arms import Arm, Context
from paper.compute import SHAPES, preset_fraction
from paper.experiments import RESULTS, Changes
from paper.figures import NOT_RUN, Figure, Table
from paper.pace import pace, prices
from paper.theory import signal

FAMILIES = {
    "24-in-24 BF16": "diffusionnft",
    "24-in-96 BF16": "naive_scaling",
    "24-in-96 naive quant": "naive_quant",
    "Sol-RL": "sol_rl",
}
BASELINE, BF16, NAIVE, OURS = FAMILIES
FITTED = f"{OURS}, 4 fitted steps"
TIMED = {
    BASELINE: ("sol_rl", "regenerate"),
    BF16: ("naive", "s"),
    OURS: ("sol_rl", "s"),
    FITTED: ("sol_rl, 4 fitted steps", "s"),
}
"""Family → row and column of equal_gpus.json that time how a prompt's samples are made. Sol-RL regenerates 24 as
24-in-24 draws them. Naive quantisation was not timed."""
SHARES = (0.3, 0.5, 0.7, 0.9, 1.0)
"""Targets of the pooled speed-up, as shares of the baseline's final gain."""

Arms = dict[tuple[str, str], Arm]


def arms(context: Context) -> Arms:
    """Arm by part and family. Weights that were not prepared have one reward."""
    parts: dict[str, tuple[str, Changes]] = {reward: (reward, {}) for reward in context.programme.rewards}
    programme = context.programme
    if programme.unprepared:
        parts[f"{programme.reward}, {programme.unprepared}"] = (programme.reward, {"model": programme.unprepared})
    return {
        (part, name): context.arm(recipe, changes, reward=reward)
        for part, (reward, changes) in parts.items()
        for name, recipe in FAMILIES.items()
    }


def figures(context: Context) -> dict[str, Any]:
    """The table, and the speed-up over all rewards by target, in iterations and in compute."""
    found = arms(context)
    others = [name for name in FAMILIES if name != BASELINE]

    def row(part: str, name: str) -> dict[str, Any]:
        arm, baseline = found[part, name], found[part, BASELINE]
        return {
            "final": arm.final(arm.reward),
            "gain, sd": arm.gain_of_ceiling(),
            f"less {BASELINE}": "" if arm is baseline else arm.less(baseline),
            "× iterations": "" if arm is baseline else pace([arm], [baseline]),
        }

    def at_shares(name: str, baseline: str) -> dict[str, Figure]:
        ours, theirs, goals = (
            [found[reward, one] for reward in context.programme.rewards] for one in (name, baseline, BASELINE)
        )
        return {f"{share:.0%}": pace(ours, theirs, share, goals=goals) for share in SHARES}

    costs = prices({name: found[context.programme.reward, name] for name in FAMILIES}, BASELINE) | measured(FAMILIES)
    iterations, predicted = {name: at_shares(name, BASELINE) for name in others}, _predicted(context, found)
    said = dict.fromkeys(others, f"{predicted['exact']:.2f}")
    ranked = "base" in predicted
    said[OURS] = f"{predicted['base']:.2f}; {predicted['along the run']:.2f} along the run" if ranked else NOT_RUN
    trained = found[context.programme.reward, OURS].config.algorithm.timestep_fraction
    return {
        "levels": {"these runs": trained, "FLUX.1's preset": preset_fraction("flux")},
        "gains": Table(["reward", "family"], {key: row(*key) for key in found}),
        "iterations": Table(
            ["family"],
            {
                **{name: {**cells, "predicted": said[name]} for name, cells in iterations.items()},
                f"{OURS} against {BF16}": {**at_shares(OURS, BF16), "predicted": ""},
            },
        ),
        "predicted": predicted,
        "costs": Table(
            ["family"],
            {
                name: {
                    clock: Figure(one.get(name), ".2f", () if name in one else ("not timed",))
                    for clock, one in costs.items()
                }
                for name in others
            },
        ),
        "compute": Table(
            ["family, target"],
            {
                f"{name}, {share}": {clock: iterations[name][share].over(one.get(name)) for clock, one in costs.items()}
                for name in others
                for share in list(iterations[name])[-2:]
            },
        ),
    }


def measured(families: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measured seconds of a prompt by large model's shape and family, in those of the baseline.

    On one GPU, with the noise levels of the model's preset, decoding and rewards included. Without families that were
    not timed.
    """
    rows = json.loads((RESULTS / "equal_gpus.json").read_text())["rows"]
    found = {}
    for shape, name in SHAPES.items():
        parts = {row["part"]: row for row in rows if (row["model"], row["gpus"]) == (shape, 1)}
        seconds = {family: parts[row][column] + parts["training"]["s"] for family, (row, column) in TIMED.items()}
        costs = {family: seconds[family] / seconds[BASELINE] for family in families if family in seconds}
        found[f"{name.partition(' ')[0]}, seconds"] = costs
    return found


def _predicted(context: Context, found: Arms) -> dict[str, float]:
    """Predicted ratios of iterations to those of the baseline, by the ranks of Sol-RL's exploration: exact ones, those
    of the base, and their mean along the run."""
    by_version = [found[reward, OURS].ranks() for reward in context.programme.rewards]
    ranks = {
        "exact": [1.0],
        "base": [rank for one in by_version for rank in one.get(0, [])],
        "along the run": [rank for one in by_version for found in one.values() for rank in found],
    }
    explores = [found[context.programme.reward, name].config.explore for name in (BASELINE, OURS)]
    base, ours = ((one.candidates, one.keep // 2) for one in explores)
    whole = signal(1.0, *base)
    return {name: signal(float(np.mean(one)), *ours) / whole for name, one in ranks.items() if one}
