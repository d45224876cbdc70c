"""Table 1: every algorithm with every reward at equal compute, each at its tuned learning rate."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from solrl_trainer.algorithms.grpo import GrpoSettings
from support.results import table

from paper.compute import SHAPES, costs_of, passes_of_iteration
from paper.experiments import Experiment
from paper.intervals import Estimate, over_seeds, over_seeds_and_prompts
from paper.published import FINAL
from paper.tables.common import (
    NOT_RUN,
    Context,
    Section,
    as_json,
    ceiling_text,
    cell,
    difference,
    final,
    gain,
    gain_text,
    pairs,
    share_text,
    signed,
)
from paper.tuning import AS_IS, GRID, SHARE, Changes, affordable, choose, trials

TITLE = "1. Algorithms at equal compute"
ALGORITHMS = {
    "DanceGRPO": "dancegrpo",
    "FlowGRPO": "flowgrpo",
    "AWM": "awm",
    "DiffusionNFT": "diffusionnft",
    "Sol-RL": "sol_rl",
}
OURS = "Sol-RL"


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """The trials, and the runs of each algorithm whose learning rate is known; `whole`: the runs of all."""
    found = [
        one for recipe in ALGORITHMS.values() for one in trials(context.programme, recipe, context.results).values()
    ]
    for reward in context.programme.rewards:
        for name in ALGORITHMS:
            found += runs_of(context, name, reward, whole=whole) or []
    return found


def runs_of(
    context: Context, algorithm: str, reward: str, *, whole: bool = False, settings: Changes = AS_IS
) -> list[Experiment] | None:
    """Runs of an algorithm with a reward; None while its learning rate is not known, unless `whole` takes any."""
    programme, recipe = context.programme, ALGORITHMS[algorithm]
    choice = choose(programme, recipe, context.runs, context.results, settings)
    if choice is None and not whole:
        return None
    count = affordable(programme, recipe, context.results, changes=settings)
    # Evaluations at equal compute too: DanceGRPO's many cheap iterations would have three times as many.
    changes = {
        **settings,
        "iterations": count,
        "evaluate.every": round(programme.every * count / programme.iterations) or programme.every,
    }
    if choice is not None:
        changes["optimizer.learning_rate"] = choice.rate
    return programme.over_seeds(recipe, changes, reward=reward)


def section(context: Context) -> Section:
    """The table."""
    programme = context.programme
    rewards = programme.rewards
    others = [name for name in ALGORITHMS if name != OURS]
    head = ["algorithm", *(f"{name}: final, gain" for name in rewards), *(f"{name}, paper" for name in rewards)]
    rows, data = [], {}
    for name in ("Base", *ALGORITHMS):
        cells = [_base(context, reward) if name == "Base" else _cell(context, name, reward) for reward in rewards]
        rows.append([name, *cells, *(f"{FINAL[name][reward]:.4f}" for reward in rewards)])
        if name != "Base":
            data[name] = {reward: as_json(_gain(context, name, reward)) for reward in rewards}
    compared = {name: _compared(context, name) for name in others}
    lines = [
        f"Every algorithm trains for the compute of {programme.iterations} iterations of Sol-RL at the shape of",
        f"{SHAPES[programme.shape]}. Final: mean reward of held-out images. Gain: in standard deviations of the base",
        "within a prompt. The paper's columns are final rewards of FLUX.1.",
        *ceiling_text(context, rewards),
        "",
        *table(head, rows),
        "",
        "Sol-RL's gain less that of each other algorithm (the paper: Sol-RL is first with every reward). Ahead: pairs",
        "of runs of one seed and reward in which Sol-RL gains more. More: how much larger Sol-RL's gain is, a mean",
        "over rewards, with its interval over seeds.",
        "",
        *table(
            ["algorithm", *rewards, "mean of all", "ahead", "more", "more, paper"],
            [[name, *_ahead_of(context, name), *_shown(compared[name])] for name in others],
        ),
        "",
        f"Learning rates: each algorithm has {len(GRID)} trials on {programme.reward} with {SHARE:.0%} of the compute,",
        "judged by the mean reward of all candidates of training prompts in the last quarter of the iterations.",
        "Recomputed: share of the compute for log-probabilities that the authors' code of FlowGRPO and DanceGRPO keeps",
        "from sampling. Steps: of the optimiser, in the whole run.",
        "",
        *table(_TUNED, [_tuned(context, name) for name in ALGORITHMS]),
    ]
    figures = {
        name: {key: as_json(one) if isinstance(one, Estimate) else one for key, one in found.items()}
        for name, found in compared.items()
    }
    ceilings = {reward: float(one.mean()) for reward in rewards if (one := context.ceiling(reward)) is not None}
    spent = {name: _spent(context, name) for name in ALGORITHMS}
    return Section(TITLE, lines, {"gains": data, "ceiling": ceilings, "compared": figures, "spent": spent})


_TUNED = [
    "algorithm",
    *(f"{rate:g}" for rate in GRID),
    "chosen",
    "iterations",
    "steps",
    "denoising",
    "recomputed",
    "passes of an iteration",
]


def _gain(context: Context, name: str, reward: str) -> Estimate | None:
    runs = runs_of(context, name, reward)
    return gain(context, runs, reward) if runs else None


def _base(context: Context, reward: str) -> str:
    for name in ALGORITHMS:
        if found := context.finished(runs_of(context, name, reward) or []):
            return f"{found[0].before[reward].mean():.4f}"
    return NOT_RUN


def _cell(context: Context, name: str, reward: str) -> str:
    runs = runs_of(context, name, reward)
    if runs is None:
        return f"{NOT_RUN}: not tuned"
    said = gain_text(context, runs, reward)
    return f"{final(context, runs, reward)}, {said}" if context.finished(runs) else said


def _ahead_of(context: Context, name: str) -> list[str]:
    cells = []
    for reward in context.programme.rewards:
        ours, theirs = (runs_of(context, algorithm, reward) for algorithm in (OURS, name))
        cells.append(cell(context, theirs, difference(context, ours, theirs, reward)) if ours and theirs else NOT_RUN)
    return cells


def _compared(context: Context, name: str) -> dict[str, Any]:
    """Sol-RL against another algorithm over all rewards; {} until all runs are finished."""
    found = []
    for reward in context.programme.rewards:
        ours, theirs = (runs_of(context, algorithm, reward) for algorithm in (OURS, name))
        both = pairs(context, ours, theirs, reward) if ours and theirs else None
        if both is None or len(both[0]) < len(context.programme.seeds):
            return {}
        found.append(both)
    ours, theirs = (np.stack(gains) for gains in zip(*found, strict=True))
    mine, other = ours.mean(2), theirs.mean(2)
    published = [
        (FINAL[OURS][reward] - FINAL["Base"][reward]) / (FINAL[name][reward] - FINAL["Base"][reward]) - 1
        for reward in context.programme.rewards
    ]
    return {
        "less": over_seeds_and_prompts((ours - theirs).mean(0)),
        "ahead": int((mine > other).sum()),
        "pairs": mine.size,
        "more": over_seeds((mine / other - 1).mean(0)),
        "more, paper": float(np.mean(published)),
    }


def _shown(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return [NOT_RUN] * 4
    more = share_text(found["more"])
    return [signed(found["less"]), f"{found['ahead']} of {found['pairs']}", more, f"{found['more, paper']:+.1%}"]


def _tuned(context: Context, name: str) -> list[str]:
    programme, recipe = context.programme, ALGORITHMS[name]
    tried = trials(programme, recipe, context.results)
    choice = choose(programme, recipe, context.runs, context.results)
    scores = [f"{choice.scores[rate]:.4f}" if choice else NOT_RUN for rate in tried]
    chosen = "not tuned" if choice is None else f"{choice.rate:g}{', at the edge' if choice.at_edge else ''}"
    spent = _spent(context, name)
    shares = [f"{spent[key]:.0%}" for key in ("denoising", "recomputed")]
    return [name, *scores, chosen, str(spent["iterations"]), str(spent["steps"]), *shares, spent["passes"]]


def _spent(context: Context, name: str) -> dict[str, Any]:
    """How an algorithm spends its compute."""
    programme, recipe = context.programme, ALGORITHMS[name]
    config = programme.experiment(recipe, programme.seeds[0]).config
    costs, passes = costs_of(programme.shape, context.results), passes_of_iteration(config)
    whole, count = costs.seconds(passes), affordable(programme, recipe, context.results)
    kept = Counter({"train old": passes["train old"]}) if isinstance(config.algorithm, GrpoSettings) else Counter()
    return {
        "iterations": count,
        "steps": count * config.optimizer.steps,
        "denoising": costs.generating(passes) / whole,
        "recomputed": costs.seconds(kept) / whole,
        "passes": ", ".join(f"{count:,} {name}" for name, count in passes.items()),
    }
