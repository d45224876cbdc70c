"""Table 5: what Sol-RL's final reward lacks to BF16 24-in-96, as a share of the gain."""

from typing import Any

import numpy as np
from support.results import table

from paper.experiments import Experiment
from paper.intervals import Estimate, Values, over_seeds_and_prompts, ratio_of_means
from paper.published import GAP
from paper.tables.common import NOT_RUN, Context, Section, as_json, pairs, rate_text, share_text, signed
from paper.tables.families import rewards

TITLE = "5. The gap to BF16"
RECIPES = ("naive_scaling", "sol_rl")
MARGIN = 0.1


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """Sol-RL and BF16 24-in-96 of every part, and the trials that choose their learning rate."""
    return context.after_trials(RECIPES, parts(context), whole=whole)


def parts(context: Context) -> list[tuple[str, dict[str, int]]]:
    """Every reward at the usual length, and the programme's own at the long one."""
    programme = context.programme
    usual = [(reward, {"iterations": programme.iterations}) for reward in rewards(context)]
    return [*usual, (programme.reward, {"iterations": programme.long})]


def section(context: Context) -> Section:
    """The table."""
    programme = context.tuned
    rows, data = [], {}
    usual: list[tuple[Values, Values]] = []
    for reward, changes in parts(context):
        iterations = changes["iterations"]
        bf16, ours = (programme.over_seeds(recipe, changes, reward=reward) for recipe in RECIPES)
        both = pairs(context, bf16, ours, reward)
        if both is None:
            rows.append([str(iterations), reward, NOT_RUN, NOT_RUN, NOT_RUN, NOT_RUN])
            continue
        if iterations == programme.iterations:
            usual.append(both)
        cells, figures = compared(both)
        few = "" if len(both[0]) == len(bf16) else f" ({len(both[0])} of {len(bf16)} seeds)"
        rows.append([f"{iterations}{few}", reward, *cells])
        data[f"{reward}, {iterations}"] = figures
    if len(usual) == len(rewards(context)) > 1 and len({len(own) for own, _ in usual}) == 1:
        pooled = (np.mean([own for own, _ in usual], axis=0), np.mean([other for _, other in usual], axis=0))
        cells, data["pooled"] = compared(pooled)
        rows.append([str(programme.iterations), "mean of all", *cells])
    lines = [
        *rate_text(context),
        "Gains in standard deviations of the base. Gap: the gain of BF16 less that of Sol-RL, as a share of the gain",
        "of BF16, paired by seed and prompt, with Fieller's interval. The last row averages the gains of all rewards",
        f"by seed and prompt. The paper reports a gap of {GAP:.0%}.",
        "",
        *table(["iterations", "trained on", "BF16 24-in-96", "Sol-RL", "gap", f"within {MARGIN:.0%}"], rows),
    ]
    return Section(TITLE, lines, {"gap": data})


def compared(both: tuple[Values, Values]) -> tuple[list[str], dict[str, Any]]:
    """Cells and figures of the gains [seeds, prompts] of BF16 and Sol-RL."""
    share = ratio_of_means(both[0] - both[1], both[0])
    bf16, ours = map(over_seeds_and_prompts, both)
    figures = {"share": as_json(share), "bf16": as_json(bf16), "sol_rl": as_json(ours)}
    return [signed(bf16), signed(ours), share_text(share), verdict(share)], figures


def verdict(share: Estimate) -> str:
    """Whether the interval lies within the margin on both sides."""
    if share.low >= -MARGIN and share.high <= MARGIN:
        return "yes"
    if share.low > MARGIN or share.high < -MARGIN:
        return "no"
    return "not decided"
