"""Table 7: long runs, and the time in which each family reaches shares of the baseline's plateau."""

from dataclasses import replace
from typing import Any

from support.results import table

from paper.experiments import Experiment
from paper.tables.common import Context, Section, as_json, difference, gain, gain_text, rate_text, signed
from paper.tables.families import BASELINE, BF16, FAMILIES, OURS, costs
from paper.tables.pace import SpeedUp, log_ratios, pooled

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
    """The table; None before any run is finished."""
    seeded, prices = _seeded(context), costs(context)
    if not any(context.finished(_runs(seeded, OURS, reward)) for reward in rewards(context)):
        return None
    levels = [
        [name, reward, gain_text(seeded, _runs(seeded, name, reward), reward), _less(seeded, name, reward)]
        for reward in rewards(context)
        for name in (BASELINE, *COMPARED)
    ]
    pace = {name: {share: _pace(seeded, name, share) for share in SHARES} for name in COMPARED}
    compute = {
        f"{name}, {clock}": {share: one.over(price) for share, one in pace[name].items()}
        for name in COMPARED
        for clock, price in prices[name].items()
    }
    shares = [f"{share:.0%}" for share in SHARES]
    lines = [
        *rate_text(context),
        f"{ITERATIONS} iterations, {len(SEEDS)} seeds; the learning rate falls to 0 along half a cosine. Gains in",
        "standard deviations of the base.",
        "",
        *table(["family", "trained on", "gain, sd", f"less {BASELINE}"], levels),
        "",
        f"× iterations and × compute, over all rewards, to a share of the final gain of {BASELINE}: its own, over",
        "those of the family. Compute as in table 2.",
        "",
        *table(["× iterations", *shares], [[name, *map(str, found.values())] for name, found in pace.items()]),
        "",
        *table(["× compute", *shares], [[name, *map(str, found.values())] for name, found in compute.items()]),
    ]
    return Section(
        TITLE,
        lines,
        {
            "gains": {
                f"{name}, {reward}": as_json(gain(seeded, _runs(seeded, name, reward), reward))
                for reward in rewards(context)
                for name in (BASELINE, *COMPARED)
            },
            "iterations": {name: _json(found) for name, found in pace.items()},
            "compute": {name: _json(found) for name, found in compute.items()},
        },
    )


def _seeded(context: Context) -> Context:
    return replace(context, programme=replace(context.programme, seeds=SEEDS))


def _runs(seeded: Context, family: str, reward: str) -> list[Experiment]:
    return seeded.tuned.over_seeds(FAMILIES[family], CHANGES, reward=reward)


def _less(seeded: Context, family: str, reward: str) -> str:
    if family == BASELINE:
        return ""
    return signed(difference(seeded, _runs(seeded, family, reward), _runs(seeded, BASELINE, reward), reward))


def _pace(seeded: Context, family: str, share: float) -> SpeedUp:
    return pooled(
        [
            log_ratios(seeded, _runs(seeded, family, reward), _runs(seeded, BASELINE, reward), reward, share)
            for reward in rewards(seeded)
        ]
    )


def _json(found: dict[float, SpeedUp]) -> dict[str, Any]:
    return {f"{share:.0%}": as_json(one.ratio) for share, one in found.items()}
