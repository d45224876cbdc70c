"""Table 10: words that a miniature writes, as RapidOCR scores them and as Tesseract reads them afterwards."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from paper.arms import Arm, Context, best, curve
from paper.experiments import AS_IS, Changes
from paper.figures import Figure, Table
from paper.intervals import over_seeds, over_seeds_and_prompts
from paper.pace import pace, prices, times
from paper.tables.algorithms import AS_AUTHORS
from paper.tables.families import BASELINE, BF16, OURS
from paper.tables.plateaus import SHARES
from paper.tuning import USUAL, Tuning
from paper.words import ENGINES, right

MODEL, REWARD = "mini-text", "ocr"
SEEDS = (1, 2, 3)
ITERATIONS = 60
EVERY = 2
CHANGES: Changes = {"explore.prompts": 8, "evaluate.fidelity_every": 20}
"""Settings of all runs. The processor reads every image: most of a run's time."""
NEAR = 0.95
"""Share of the baseline's best gain at which families are compared."""


class Family(NamedTuple):
    """A recipe, and the trials that choose its learning rate."""

    recipe: str
    tuning: Tuning = USUAL


AWM, FLOWGRPO = Tuning("awm"), Tuning("flowgrpo", AS_AUTHORS)
FAMILIES = {
    BASELINE: Family("diffusionnft"),
    BF16: Family("naive_scaling"),
    OURS: Family("sol_rl"),
    "AWM": Family("awm", AWM),
    "AWM two-stage": Family("awm_two_stage", AWM),
    "FlowGRPO": Family("flowgrpo", FLOWGRPO),
}
"""24-in-24 BF16 is DiffusionNFT."""
FAST = {
    "optimizer.learning_rate": 0.001,
    "optimizer.cosine_iterations": ITERATIONS,
    "iterations": 24,
    "evaluate.every": 1,
}
VARIANTS: dict[str, tuple[Changes, tuple[str, ...]]] = {
    "guidance 2": ({"guidance": 2.0, "iterations": 30}, (BASELINE, OURS, "AWM")),
    "rate 0.001": (FAST, (BASELINE, BF16, OURS)),
}
"""Shorter runs of some families: with guidance, and at AWM's learning rate."""

Arms = dict[tuple[str, str], Arm]


def on_text(context: Context) -> Context:
    """The context with the programme of this table."""
    programme = replace(
        context.programme,
        model=MODEL,
        reward=REWARD,
        rewards=(REWARD,),
        judges=(),
        seeds=SEEDS,
        iterations=ITERATIONS,
        every=EVERY,
        changes={**CHANGES, **context.programme.changes},
    )
    return replace(context, programme=programme)


def arms(context: Context) -> Arms:
    """Arm by variant, of which the usual one has no name, and family."""
    own = on_text(context)

    def arm(name: str, changes: Changes = AS_IS) -> Arm:
        recipe, tuning = FAMILIES[name]
        falling = {"optimizer.cosine_iterations": changes.get("iterations", ITERATIONS)}
        return own.arm(recipe, {**tuning.changes, **falling, **changes}, tuning=tuning)

    variants = {(label, name): arm(name, changes) for label, (changes, names) in VARIANTS.items() for name in names}
    return {("", name): arm(name) for name in FAMILIES} | variants


def figures(context: Context) -> dict[str, Any]:
    """The table."""
    found = arms(context)
    usual = {name: found["", name] for name in FAMILIES}
    own = usual[BASELINE].context
    costs, others = prices(usual, BASELINE), [name for name in FAMILIES if name != BASELINE]

    def at(share: float, label: str, name: str) -> Figure:
        return pace([found[label, name]], [found[label, BASELINE]], share, height=best)

    iterations = {name: {f"{share:.0%}": at(share, "", name) for share in SHARES} for name in others}
    rows = {"base": {"end": _begin(usual[BASELINE]), "best": "", "to 95 %": "", **_exact(usual[BASELINE], "before")}}
    variants = {}
    for (label, name), arm in found.items():
        baseline = found[label, BASELINE]
        reached = [one for (one,) in times([arm], baseline, NEAR, best)]
        cells = {
            "best": arm.each(lambda run, reward: best(curve(run, reward)), ".2f"),
            "to 95 %": "never" if math.inf in reached else Figure(over_seeds(np.array(reached)), ".1f"),
        }
        exact = _exact(arm, "after")
        if label:
            paces = {f"× iterations, {share:.0%}": at(share, label, name) for share in (0.5, NEAR)}
            ahead = dict.fromkeys(paces, "") if arm is baseline else paces
            variants[label, name] = {"base": _begin(arm), **cells, **ahead, **exact}
        else:
            rows[name] = {"end": arm.each(lambda run, reward: run.after[reward].mean(), ".2f"), **cells, **exact}
    return {
        "prompts": usual[BASELINE].config.explore.prompts,
        "rates": {
            name: own.choice(one.tuning).rate for name, one in FAMILIES.items() if one.recipe == one.tuning.recipe
        },
        "families": Table(["family"], rows),
        "iterations": Table(["family"], iterations),
        "costs": costs,
        "compute": Table(
            ["family"],
            {
                name: {clock: iterations[name][f"{NEAR:.0%}"].over(one[name]) for clock, one in costs.items()}
                for name in others
            },
        ),
        "variants": Table(["variant", "family"], variants),
        "pictures": {name: picture_of(name) for name in FAMILIES},
    }


def _begin(arm: Arm) -> Figure:
    """Reward of the base."""
    return Figure(arm.runs[0].curve[0][1][REWARD], ".3f")


def _exact(arm: Arm, when: str) -> dict[str, Figure]:
    """Share of words that each engine reads exactly, if all runs were read; before training without an interval."""
    found = {}
    for engine, name in ENGINES.items():
        read = all(run.words for run in arm.runs)
        exact = over_seeds_and_prompts(np.stack([right(run, engine, when) for run in arm.runs])) if read else None
        value = exact.mean if exact and when == "before" else exact
        found[f"exact, {name}"] = Figure(value, ".0%", () if read else ("not read",))
    return found


def picture_of(name: str) -> str:
    """Picture of a family's first prompts, relative to the page."""
    return f"paper/text-{name.lower().replace(' ', '-')}.png"
