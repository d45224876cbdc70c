"""Tables 1, 6 and 8: every algorithm with every reward at equal compute, each at its tuned learning rate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from solrl_trainer.algorithms.grpo import GrpoSettings

from paper.arms import Arm, Context, averaged, curve, paired
from paper.compute import passes_of_iteration, seconds_by_pass
from paper.figures import NOT_RUN, Figure, Table
from paper.intervals import Values, over_seeds, over_seeds_and_prompts
from paper.pace import pace, prices, times
from paper.published import FINAL
from paper.tables import families
from paper.tuning import GRID, Tuning, affordable, trials

ALGORITHMS = {
    "DanceGRPO": Tuning("dancegrpo"),
    "FlowGRPO": Tuning("flowgrpo"),
    "AWM": Tuning("awm"),
    "DiffusionNFT": Tuning("diffusionnft"),
    "Sol-RL": Tuning("sol_rl"),
}
*OTHERS, OURS = ALGORITHMS
BASELINE = "DiffusionNFT"
"""24-in-24, at Sol-RL's compute."""
JUDGE = "judge"
NEAR = 0.9
"""Share of the gain of 24-in-24 at which pace and judge are compared."""
EARLY = 10
"""Iterations of a trial that show how fast a learning rate begins."""
AS_AUTHORS = {"algorithm.recompute": False, "optimizer.updates": 6}
"""Log-probabilities are kept from sampling, and an iteration has six optimiser steps."""
BY_AUTHORS = {name: Tuning(ALGORITHMS[name].recipe, AS_AUTHORS) for name in ("DanceGRPO", "FlowGRPO")}

Arms = dict[tuple[str, str], Arm]


def arms(context: Context, tunings: Mapping[str, Tuning] = ALGORITHMS) -> Arms:
    """Arm by reward and algorithm."""
    return {
        (reward, name): context.at_equal_compute(tuning, reward)
        for reward in context.programme.rewards
        for name, tuning in tunings.items()
    }


def figures(context: Context) -> dict[str, Any]:
    """Table 1."""
    found, rewards = arms(context), context.programme.rewards
    return {
        "gains": Table(["algorithm"], {name: _gains(found, name, rewards) for name in ("Base", *ALGORITHMS)}),
        "ceiling": context.ceilings,
        "compared": Table(["algorithm"], {name: _compared(found, name, rewards) for name in OTHERS}),
        "spent": Table(["algorithm"], {name: _spent(context, name) for name in ALGORITHMS}),
        "pace": Table(["algorithm"], _pace(found, rewards)),
        "early": {name: Figure(_early(context, ALGORITHMS[name]), "+.4f") for name in ("AWM", BASELINE)},
    }


def _gains(found: Arms, name: str, rewards: tuple[str, ...]) -> dict[str, Any]:
    def cell(reward: str) -> Any:
        if name == "Base":
            bases = [run.before[reward].mean() for algorithm in ALGORITHMS for run in found[reward, algorithm].runs]
            return Figure(float(bases[0]) if bases else None, ".4f")
        own = found[reward, name]
        return (own.final(reward), own.gain_of_ceiling()) if own.runs else own.gain()

    return {
        **{f"{reward}: final, gain": cell(reward) for reward in rewards},
        **{f"{reward}, paper": Figure(FINAL[name][reward], ".4f") for reward in rewards},
    }


def _compared(found: Arms, name: str, rewards: tuple[str, ...]) -> dict[str, Any]:
    """Sol-RL against another algorithm, also over all rewards once all runs are finished."""
    both = [(found[reward, OURS], found[reward, name]) for reward in rewards]
    cells = {reward: ours.less(theirs) for reward, (ours, theirs) in zip(rewards, both, strict=True)}
    if not all(arm.complete for pair in both for arm in pair):
        return cells | dict.fromkeys(("mean of all", "ahead", "more", "more, paper"), NOT_RUN)
    ours, theirs = (np.stack([arm.gains(arm.reward) for arm in side]) for side in zip(*both, strict=True))
    mine, other = ours.mean(2), theirs.mean(2)
    published = [
        (FINAL[OURS][reward] - FINAL["Base"][reward]) / (FINAL[name][reward] - FINAL["Base"][reward]) - 1
        for reward in rewards
    ]
    return {
        **cells,
        "mean of all": Figure(over_seeds_and_prompts((ours - theirs).mean(0))),
        "ahead": f"{(mine > other).sum()} of {mine.size}",
        "more": _more(both),
        "more, paper": Figure(float(np.mean(published)), "+.1%"),
    }


def _more(both: Sequence[tuple[Arm, Arm]]) -> Figure | str:
    """How much larger the gain of the first of two arms is, a mean over rewards once all runs are finished."""
    if not all(arm.complete for pair in both for arm in pair):
        return NOT_RUN
    ours, theirs = (np.stack([arm.gains(arm.reward).mean(1) for arm in side]) for side in zip(*both, strict=True))
    return Figure(over_seeds((ours / theirs - 1).mean(0)), "+.1%")


def _spent(context: Context, name: str) -> dict[str, Any]:
    """Trials of an algorithm, and how it spends its compute."""
    programme, tuning, choice = context.programme, ALGORITHMS[name], context.choice(ALGORITHMS[name])
    config = programme.experiment(tuning.recipe, programme.seeds[0]).config
    passes, count, seconds = passes_of_iteration(config), affordable(programme, tuning), seconds_by_pass(config)
    denoising = sum(one for kind, one in seconds.items() if kind.startswith("generate"))
    recomputed = seconds["train old"] if isinstance(config.algorithm, GrpoSettings) else 0.0
    chosen = "not tuned" if choice is None else f"{choice.rate:g}{', at the edge' if choice.at_edge else ''}"
    return {
        **{f"{rate:g}": Figure(choice.scores[rate] if choice else None, ".4f") for rate in GRID},
        "chosen": chosen,
        "iterations": count,
        "steps": count * config.optimizer.updates,
        "denoising": Figure(denoising / sum(seconds.values()), ".0%"),
        "recomputed": Figure(recomputed / sum(seconds.values()), ".0%"),
        "passes of an iteration": ", ".join(f"{count:,} {kind}" for kind, count in passes.items()),
    }


def _pace(found: Arms, rewards: tuple[str, ...]) -> dict[str, dict[str, Figure]]:
    """Iterations and compute of 24-in-24 to a share of its final gain, over those of faster algorithms."""
    costs = prices({name: found[rewards[0], name] for name in (BASELINE, "AWM", OURS)}, BASELINE)
    rows = {}
    for name in ("AWM", OURS):
        ours, theirs = ([found[reward, one] for reward in rewards] for one in (name, BASELINE))
        times = pace(ours, theirs, NEAR)
        compute = {f"× compute, {clock}": times.over(cost[name]) for clock, cost in costs.items()}
        rows[name] = {"× iterations": times, **compute}
    return rows


def _early(context: Context, tuning: Tuning) -> float | None:
    """Mean training reward of the first iterations of the trial at 0.001, less that of the trial at 0.0003."""
    tried = trials(context.programme, tuning)
    runs = [context.runs.get(tried[rate].name) for rate in (1e-3, 3e-4)]
    if None in runs:
        return None
    fast, slow = (np.mean([line["proxy_mean"] for line in run.iterations[:EARLY]]) for run in runs if run)
    return float(fast - slow)


def hacking(context: Context) -> dict[str, Any]:
    """Table 6: rewards that were not trained and the judges, beside the trained one."""

    def row(arm: Arm) -> dict[str, Any]:
        gains = {judge: arm.gain(judge) for judge in context.programme.judged_by}
        gains[arm.reward] = replace(gains[arm.reward], bold=bool(arm.runs))
        if not arm.runs:
            return {**gains, "fell": NOT_RUN, "grid": ""}
        rose = gains[arm.reward].value.low > 0
        fell = [judge for judge, one in gains.items() if rose and one.value.high < 0]
        return {**gains, "fell": ", ".join(fell) or "none", "grid": f"[grid]({grid_path(arm)})"}

    return {
        "gains": Table(["trained on", "algorithm"], {key: row(arm) for key, arm in arms(context).items()}),
        "at equal reward": Table(["trained on"], _judged_at_equal_reward(context)),
    }


def _judged_at_equal_reward(context: Context) -> dict[str, dict[str, Figure]]:
    """Gain of the judge when a run reaches a share of the trained gain of 24-in-24, by reward and family."""
    found, small = arms(context), families.arms(context)
    rows, by_reward = {}, []
    for reward in context.programme.rewards:
        goal = small[reward, families.BASELINE]
        compared = {families.BASELINE: goal, OURS: found[reward, OURS], "AWM": found[reward, "AWM"]}
        judged = _judged(list(compared.values()), goal) if JUDGE in context.programme.judges else None
        by_reward.append(np.empty((0, 3)) if judged is None else judged)
        rows[reward] = {
            name: Figure(None if judged is None else float(judged[:, column].mean()))
            for column, name in enumerate(compared)
        }
    every = averaged(by_reward)
    rows["mean of all"] = {
        name: Figure(None if every is None else float(every[:, column].mean())) for column, name in enumerate(compared)
    }
    for row, judged in zip(rows.values(), (*by_reward, every), strict=True):
        for column, name in list(enumerate(compared))[1:]:
            apart = judged[:, column] - judged[:, 0] if judged is not None and len(judged) else None
            row[f"{name} less {families.BASELINE}"] = Figure(None if apart is None else over_seeds(apart))
    return rows


def _judged(compared: Sequence[Arm], goal: Arm) -> Values | None:
    """Gain of the judge when each arm reaches the target [seeds, arms]; None if a run does not get there."""
    reached = times(compared, goal, NEAR)
    if not reached or not np.isfinite(reached).all():
        return None
    found = []
    for runs, ats in zip(paired(*compared, goal), reached, strict=True):
        points = [np.array(curve(run, JUDGE)).T for run in runs[:-1]]
        found.append(
            [
                (np.interp(at, *one) - one[1, 0]) / run.within[JUDGE]
                for run, one, at in zip(runs, points, ats, strict=False)
            ]
        )
    return np.array(found)


def grid_path(arm: Arm) -> str:
    """Path of the images of an arm's first run, from the page."""
    return f"paper/{arm.experiments[0].name}.png"


def by_authors(context: Context) -> Arms:
    """FlowGRPO and DanceGRPO as their authors' code trains, with the same tuning and compute."""
    return arms(context, BY_AUTHORS)


def authors(context: Context) -> dict[str, Any]:
    """Table 8: these beside the arms of table 1."""
    usual, found = arms(context), by_authors(context)
    rows = {
        (name, reward): {
            "gain, sd": found[reward, name].gain_of_ceiling(),
            f"{OURS} less it": usual[reward, OURS].less(found[reward, name]),
            "table 1's less it": usual[reward, name].less(found[reward, name]),
        }
        for name in BY_AUTHORS
        for reward in context.programme.rewards
    }
    more = {
        name: _more([(usual[reward, OURS], found[reward, name]) for reward in context.programme.rewards])
        for name in BY_AUTHORS
    }
    rates = {name: choice.rate for name, tuning in BY_AUTHORS.items() if (choice := context.choice(tuning))}
    return {"gains": Table(["algorithm", "trained on"], rows), "more": more, "rates": rates}
