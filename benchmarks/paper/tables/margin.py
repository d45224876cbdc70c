"""Table 9: the gap to BF16 of table 5 with more seeds, against the paper's margin."""

from dataclasses import replace

import numpy as np
from support.results import table

from paper.experiments import Experiment
from paper.intervals import Values
from paper.published import GAP
from paper.tables.common import Context, Section, pairs
from paper.tables.families import rewards
from paper.tables.gap import RECIPES, compared

TITLE = "9. The gap to BF16 with more seeds"
SEEDS = tuple(range(1, 17))
OVER_ALL = "mean of all"


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """Sol-RL and BF16 24-in-96 with every reward and seed, and the trials that choose their learning rate."""
    return _seeded(context).after_trials(RECIPES, [(reward, {}) for reward in rewards(context)], whole=whole)


def section(context: Context) -> Section | None:
    """The table; None before a reward has more seeds than table 5."""
    found = {reward: both for reward in rewards(context) if (both := _both(context, reward, SEEDS))}
    if max((len(own) for own, _ in found.values()), default=0) <= len(context.programme.seeds):
        return None
    if shared := [seed for seed in SEEDS if all(_both(context, reward, (seed,)) for reward in rewards(context))]:
        every = [_both(context, reward, shared) for reward in rewards(context)]
        found[OVER_ALL] = tuple(np.mean([both[side] for both in every if both], axis=0) for side in (0, 1))
    rows, data = [], {}
    for name, both in found.items():
        (bf16, ours, share, _), data[name] = compared(both)
        rows.append([name, str(len(both[0])), bf16, ours, share])
    lines = [
        f"As table 5, with the seeds that both have finished, of {len(SEEDS)}. The last row averages the gains of all",
        f"rewards over the seeds that all of them have. The paper reports a gap of {GAP:.0%}.",
        "",
        *table(["trained on", "seeds", "BF16 24-in-96", "Sol-RL", "gap"], rows),
    ]
    return Section(TITLE, lines, {"gap": data})


def _seeded(context: Context, seeds: tuple[int, ...] = SEEDS) -> Context:
    return replace(context, programme=replace(context.programme, seeds=seeds))


def _both(context: Context, reward: str, seeds: tuple[int, ...] | list[int]) -> tuple[Values, Values] | None:
    tuned = _seeded(context, tuple(seeds)).tuned
    bf16, ours = (tuned.over_seeds(recipe, reward=reward) for recipe in RECIPES)
    return pairs(context, bf16, ours, reward)
