"""Tables 5 and 9: what Sol-RL's final reward lacks to BF16 24-in-96, as a share of the gain and of the score."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paper.arms import Arm, Context, averaged, paired
from paper.figures import NOT_RUN, Figure, Table
from paper.finished import Finished
from paper.intervals import Estimate, over_seeds, over_seeds_and_prompts, ratio_of_means

FAMILIES = {"BF16 24-in-96": "naive_scaling", "Sol-RL": "sol_rl"}
MARGIN = 0.1
SEEDS = tuple(range(1, 17))

Arms = dict[tuple[str, str, str], Arm]


def arms(context: Context) -> Arms:
    """Arm by iterations, reward and family: every reward at the usual length, the programme's own at the long one."""
    programme = context.programme
    usual = [(programme.iterations, reward) for reward in programme.rewards]
    return {
        (str(length), reward, name): context.arm(recipe, {"iterations": length}, reward=reward)
        for length, reward in (*usual, (programme.long, programme.reward))
        for name, recipe in FAMILIES.items()
    }


def figures(context: Context) -> dict[str, Any]:
    """Table 5."""
    rows = _rows(arms(context))
    for row in rows.values():
        row[f"within {MARGIN:.0%}"] = verdict(row["gap"].value) if row["gap"].value else NOT_RUN
    return {"gap": Table(["iterations", "trained on"], rows)}


def seeded(context: Context) -> Arms:
    """The arms of the usual length with more seeds."""
    length = context.programme.iterations
    return {
        (str(length), reward, name): context.arm(recipe, {"iterations": length}, reward=reward, seeds=SEEDS)
        for reward in context.programme.rewards
        for name, recipe in FAMILIES.items()
    }


def margin(context: Context) -> dict[str, Any]:
    """Table 9."""
    rows = {reward: {"seeds": len(SEEDS), **row} for (_, reward), row in _rows(seeded(context)).items()}
    return {"gap": Table(["trained on"], rows)}


def _rows(runs: Arms) -> dict[tuple[str, str], dict[str, Any]]:
    """Gains of both families and the gap between them, and means over the rewards of the first length."""
    keys = list(dict.fromkeys((length, reward) for length, reward, _ in runs))
    usual = keys[0][0]
    pooled = {key: [key] for key in keys} | {(usual, "mean of all"): [key for key in keys if key[0] == usual]}
    return {key: _row([[runs[*pair, name] for name in FAMILIES] for pair in alike]) for key, alike in pooled.items()}


def _row(by_reward: Sequence[Sequence[Arm]]) -> dict[str, Figure]:
    """Figures over the seeds that both families have, means over rewards."""
    both = averaged(
        [np.array([[run.gain(pair[0].reward) for run in runs] for runs in paired(*pair)]) for pair in by_reward]
    )
    if both is None:
        return dict.fromkeys((*FAMILIES, "gap", "gap in scores"), Figure(None))
    bf16, ours = np.moveaxis(both, 1, 0)
    count, all_seeds = len(both), len(by_reward[0][0].experiments)
    notes = (f"{count} of {all_seeds} seeds",) if count < all_seeds else ()
    gains = [Figure(over_seeds_and_prompts(one)) for one in (bf16, ours)]
    shares = [[_lacking(*runs, pair[0].reward) for runs in paired(*pair)] for pair in by_reward]
    return dict(zip(FAMILIES, gains, strict=True)) | {
        "gap": Figure(ratio_of_means(bf16 - ours, bf16), "+.1%", notes),
        "gap in scores": Figure(over_seeds(np.mean(shares, axis=0)), "+.2%", notes),
    }


def _lacking(bf16: Finished, ours: Finished, reward: str) -> float:
    """What the final score of ours lacks, as a share of that of BF16."""
    return float(1 - ours.after[reward].mean() / bf16.after[reward].mean())


def verdict(share: Estimate) -> str:
    """Whether the interval lies within the margin on both sides."""
    if share.low >= -MARGIN and share.high <= MARGIN:
        return "yes"
    if share.low > MARGIN or share.high < -MARGIN:
        return "no"
    return "not decided"
