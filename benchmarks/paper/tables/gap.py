"""Tables 5 and 9: what Sol-RL's final reward lacks to BF16 24-in-96, as a share of the gain."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paper.arms import Arm, Context, averaged, paired
from paper.figures import NOT_RUN, Figure, Table
from paper.intervals import Estimate, Values, over_seeds_and_prompts, ratio_of_means

FAMILIES = {"BF16 24-in-96": "naive_scaling", "Sol-RL": "sol_rl"}
MARGIN = 0.1
SEEDS = tuple(range(1, 17))

Pair = tuple[Arm, Arm]


def _pair(context: Context, reward: str, iterations: int, seeds: Sequence[int] | None = None) -> Pair:
    bf16, ours = (
        context.arm(recipe, {"iterations": iterations}, reward=reward, seeds=seeds) for recipe in FAMILIES.values()
    )
    return bf16, ours


def pairs(context: Context) -> dict[str, Pair]:
    """BF16 and Sol-RL by iterations and reward: every reward at the usual length, the programme's at the long one."""
    programme = context.programme
    usual = [(programme.iterations, reward) for reward in context.programme.rewards]
    return {
        (str(length), reward): _pair(context, reward, length)
        for length, reward in (*usual, (programme.long, programme.reward))
    }


def seeded(context: Context) -> dict[str, Pair]:
    """The same by reward, with more seeds."""
    return {reward: _pair(context, reward, context.programme.iterations, SEEDS) for reward in context.programme.rewards}


def figures(context: Context) -> dict[str, Any]:
    """Table 5."""
    usual, found = str(context.programme.iterations), pairs(context)
    rows = {key: compared([pair]) for key, pair in found.items()}
    rows[usual, "mean of all"] = compared([pair for (length, _), pair in found.items() if length == usual])
    for row in rows.values():
        row[f"within {MARGIN:.0%}"] = verdict(row["gap"].value) if row["gap"].value else NOT_RUN
    return {"gap": Table(["iterations", "trained on"], rows)}


def margin(context: Context) -> dict[str, Any]:
    """Table 9."""
    found = seeded(context)
    rows = {**{key: [pair] for key, pair in found.items()}, "mean of all": list(found.values())}
    return {
        "gap": Table(["trained on"], {key: {"seeds": len(SEEDS), **compared(one)} for key, one in rows.items()}),
    }


def compared(by_reward: Sequence[Pair]) -> dict[str, Any]:
    """Gains of both families and the gap between them, over seeds that both have, a mean over rewards."""
    sides = [averaged([_gains(pair, side) for pair in by_reward]) for side in (0, 1)]
    if sides[0] is None or sides[1] is None:
        return dict.fromkeys((*FAMILIES, "gap"), Figure(None))
    gains = dict(zip(FAMILIES, map(Figure, map(over_seeds_and_prompts, sides)), strict=True))
    count, all_seeds = len(sides[0]), len(by_reward[0][0].experiments)
    notes = (f"{count} of {all_seeds} seeds",) if count < all_seeds else ()
    return {**gains, "gap": Figure(ratio_of_means(sides[0] - sides[1], sides[0]), "+.1%", notes)}


def _gains(pair: Pair, side: int) -> Values:
    """Gains [seeds, prompts] of one side, for seeds that both have."""
    return np.array([runs[side].gain(pair[0].reward) for runs in paired(*pair)])


def verdict(share: Estimate) -> str:
    """Whether the interval lies within the margin on both sides."""
    if share.low >= -MARGIN and share.high <= MARGIN:
        return "yes"
    if share.low > MARGIN or share.high < -MARGIN:
        return "no"
    return "not decided"
