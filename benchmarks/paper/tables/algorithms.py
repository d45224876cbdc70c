"""Table 1: every algorithm with every reward at equal compute, each at its tuned learning rate."""

from collections.abc import Sequence

from solrl_trainer.settings.config import RunConfig
from support.results import table

from paper.compute import SHAPES, costs_of, passes_of_iteration
from paper.experiments import Experiment
from paper.intervals import Estimate
from paper.published import FINAL
from paper.tables.common import NOT_RUN, Context, Section, as_json, cell, difference, final, gain
from paper.tuning import GRID, SHARE, affordable, choose, trials

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


def runs_of(context: Context, algorithm: str, reward: str, *, whole: bool = False) -> list[Experiment] | None:
    """Runs of an algorithm with a reward; None while its learning rate is not known, unless `whole` takes any."""
    programme, recipe = context.programme, ALGORITHMS[algorithm]
    choice = choose(programme, recipe, context.runs, context.results)
    if choice is None and not whole:
        return None
    count = affordable(programme, recipe, context.results)
    # Evaluations at equal compute too: DanceGRPO's many cheap iterations would have three times as many.
    changes = {
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
    lines = [
        f"Every algorithm trains for the compute of {programme.iterations} iterations of Sol-RL at the shape of",
        f"{SHAPES[programme.shape]}. Final: mean reward of held-out images. Gain: in standard deviations of the base",
        "within a prompt. The paper's columns are final rewards of FLUX.1.",
        "",
        *table(head, rows),
        "",
        "Sol-RL's gain less that of each other algorithm (the paper: Sol-RL is first with every reward):",
        "",
        *table(
            ["reward", *others],
            [[reward, *(_ahead_of(context, name, reward) for name in others)] for reward in rewards],
        ),
        "",
        f"Learning rates: each algorithm has {len(GRID)} trials on {programme.reward} with {SHARE:.0%} of the compute,",
        "judged by the mean reward of all candidates of training prompts in the last quarter of the iterations.",
        "",
        *table(_TUNED, [_tuned(context, name) for name in ALGORITHMS]),
    ]
    return Section(TITLE, lines, {"gains": data})


_TUNED = [
    "algorithm",
    *(f"{rate:g}" for rate in GRID),
    "chosen",
    "iterations",
    "denoising, share",
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
    said = cell(context, runs, gain(context, runs, reward))
    return f"{final(context, runs, reward)}, {said}" if context.finished(runs) else said


def _ahead_of(context: Context, name: str, reward: str) -> str:
    ours, theirs = (runs_of(context, algorithm, reward) for algorithm in (OURS, name))
    return cell(context, theirs, difference(context, ours, theirs, reward)) if ours and theirs else NOT_RUN


def _tuned(context: Context, name: str) -> list[str]:
    programme, recipe = context.programme, ALGORITHMS[name]
    tried = trials(programme, recipe, context.results)
    choice = choose(programme, recipe, context.runs, context.results)
    scores = [f"{choice.scores[rate]:.4f}" if choice else NOT_RUN for rate in tried]
    chosen = "not tuned" if choice is None else f"{choice.rate:g}{', at the edge' if choice.at_edge else ''}"
    config = programme.experiment(recipe, programme.seeds[0]).config
    count = affordable(programme, recipe, context.results)
    return [name, *scores, chosen, str(count), *_spent(context, config)]


def _spent(context: Context, config: RunConfig) -> Sequence[str]:
    costs, passes = costs_of(context.programme.shape, context.results), passes_of_iteration(config)
    share = costs.generating(passes) / costs.seconds(passes)
    return f"{share:.0%}", ", ".join(f"{count:,} {name}" for name, count in passes.items())
