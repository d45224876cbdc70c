"""Table 2: the four rollout families, their learning curves, and how soon each reaches the reward of 24-in-24."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from support.results import table

from paper.experiments import Experiment
from paper.published import SPEED_UP
from paper.tables.common import (
    NOT_RUN,
    Context,
    Section,
    as_json,
    ceiling_text,
    difference,
    final,
    gain,
    gain_text,
    rate_text,
    signed,
)
from paper.tables.pace import SpeedUp, clocks_of, log_ratios, pooled, speed_up
from paper.theory import signal

TITLE = "2. Rollout families"
FAMILIES = {
    "24-in-24 BF16": "diffusionnft",
    "24-in-96 BF16": "naive_scaling",
    "24-in-96 naive quant": "naive_quant",
    "Sol-RL": "sol_rl",
}
BASELINE, BF16, NAIVE, OURS = FAMILIES
SHARES = (0.3, 0.5, 0.7, 0.9, 1.0)
"""Targets of the pooled speed-up, as shares of the baseline's final gain."""


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
    programme, prices = context.tuned, costs(context)
    rows, data = [], {}
    for part, (reward, changes) in parts(context).items():
        baseline = programme.over_seeds(FAMILIES[BASELINE], changes, reward=reward)
        for name, recipe in FAMILIES.items():
            runs = programme.over_seeds(recipe, changes, reward=reward)
            own, against = gain(context, runs, reward), difference(context, runs, baseline, reward)
            pace = speed_up(log_ratios(context, runs, baseline, reward))
            said = ["", ""] if name == BASELINE else [signed(against), str(pace)]
            rows.append([part, name, final(context, runs, reward), gain_text(context, runs, reward), *said])
            data[f"{part}, {name}"] = {
                "gain": as_json(own),
                "less": as_json(against),
                "iterations": _json(pace),
                "compute": {clock: _json(pace.over(price)) for clock, price in prices[name].items()},
            }
    lines = [
        *rate_text(context),
        f"Trained for {programme.iterations} iterations. × iterations: those in which {BASELINE} reaches its own",
        "final reward, over those in which the family reaches that reward, with its interval over seeds; evaluations",
        f"are every {programme.every} iterations, with straight lines between them.",
        *ceiling_text(context, rewards(context)),
        "",
        *table(["reward", "family", "final", "gain, sd", f"less {BASELINE}", "× iterations"], rows),
    ]
    below, figures = _time_to_a_reward(context, prices)
    return Section(TITLE, [*lines, "", *below], {"families": data, **figures})


def _time_to_a_reward(context: Context, prices: Mapping[str, Mapping[str, float]]) -> tuple[list[str], dict[str, Any]]:
    """Lines and figures of the speed-up over all rewards, by target, in iterations and in compute."""
    others, (low, high) = [name for name in FAMILIES if name != BASELINE], SPEED_UP
    pace = {name: {share: over_rewards(context, name, BASELINE, share) for share in SHARES} for name in others}
    compute = {
        f"{name}, {share:.0%}": {clock: pace[name][share].over(price) for clock, price in prices[name].items()}
        for name in others
        for share in SHARES[-2:]
    }
    against, clocks = {share: over_rewards(context, OURS, BF16, share) for share in SHARES}, list(prices[BASELINE])
    lines = [
        "### Time to a reward",
        "",
        f"× iterations over all rewards of {context.programme.model}, by target: a share of the final gain of",
        f"{BASELINE}. A seed's rewards share its prompts and noise, so the mean over rewards is one value of the",
        "seed. Predicted: the ratio of the signals of a sample in a Gaussian model, with exact ranks, and for Sol-RL",
        "with those of its runs.",
        "",
        *table(
            ["family", *(f"{share:.0%}" for share in SHARES), "predicted"],
            [
                *([name, *map(str, pace[name].values()), _predicted(context, name)] for name in others),
                [f"{OURS} against {BF16}", *map(str, against.values()), ""],
            ],
        ),
        "",
        f"Compute of an iteration, in iterations of {BASELINE}: passes weighted by their times at a large model's",
        "shape. The number beside a shape is the share of noise levels that are trained: that of these runs, and that",
        "of the large model's preset.",
        "",
        *table(["family", *clocks], [[name, *(f"{one:.2f}" for one in prices[name].values())] for name in others]),
        "",
        f"× compute to a share of the final gain of {BASELINE}, over all rewards. The paper: {low:g} to {high:g} ×",
        "in time.",
        "",
        *table(["family, target", *clocks], [[name, *map(str, found.values())] for name, found in compute.items()]),
    ]
    return lines, {
        "cost of an iteration": prices,
        "iterations": {name: {f"{share:.0%}": _json(one) for share, one in pace[name].items()} for name in others},
        "compute": {name: {clock: _json(one) for clock, one in found.items()} for name, found in compute.items()},
        "iterations of BF16": {f"{share:.0%}": _json(one) for share, one in against.items()},
        "predicted": predicted(context),
    }


def _json(pace: SpeedUp) -> dict[str, Any] | None:
    return as_json(pace.ratio)


def over_rewards(context: Context, name: str, baseline: str, share: float) -> SpeedUp:
    """Speed-up of a family over another one to this share of the final gain of 24-in-24, over all rewards."""
    found = []
    for reward in rewards(context):
        ours, theirs, goal = (
            context.tuned.over_seeds(FAMILIES[family], reward=reward) for family in (name, baseline, BASELINE)
        )
        found.append(log_ratios(context, ours, theirs, reward, share, goal))
    return pooled(found)


def costs(context: Context) -> dict[str, dict[str, float]]:
    """Compute of a family's iteration by family and clock, in iterations of the baseline."""
    configs = {
        name: context.tuned.experiment(recipe, context.programme.seeds[0]).config for name, recipe in FAMILIES.items()
    }
    clocks = clocks_of(context)
    return {
        name: {label: clock(config) / clock(configs[BASELINE]) for label, clock in clocks.items()}
        for name, config in configs.items()
    }


def predicted(context: Context) -> dict[str, float]:
    """Predicted ratios of iterations to those of the baseline, by the ranks of Sol-RL's exploration: exact ones, those
    of the base, and their mean along the run."""
    programme = context.tuned
    experiments = [one for reward in rewards(context) for one in programme.over_seeds(FAMILIES[OURS], reward=reward)]
    lines = [line for run in context.finished(experiments) for line in run.fidelity]
    ranks = {"exact": [1.0], "base": [line["spearman"] for line in lines if not line["version"]]}
    ranks["along the run"] = [line["spearman"] for line in lines]
    sizes = {}
    for name in (BASELINE, OURS):
        config = programme.experiment(FAMILIES[name], programme.seeds[0]).config
        sizes[name] = (config.explore.candidates, config.explore.keep // 2)
    base = signal(1.0, *sizes[BASELINE])
    return {name: signal(float(np.mean(one)), *sizes[OURS]) / base for name, one in ranks.items() if one}


def _predicted(context: Context, name: str) -> str:
    found = predicted(context)
    if name != OURS:
        return f"{found['exact']:.2f}"
    return f"{found['base']:.2f}; {found['along the run']:.2f} along the run" if "base" in found else NOT_RUN
