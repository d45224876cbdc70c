"""Table 10: words that a miniature writes, as RapidOCR scores them and as Tesseract reads them afterwards."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from support.results import table

from paper.compute import SHAPES, costs_of, passes_of_iteration, preset_fraction
from paper.experiments import Experiment
from paper.finished import Finished
from paper.intervals import Estimate, over_seeds, over_seeds_and_prompts
from paper.tables import authors
from paper.tables.common import TUNED_FOR, Context, Section, as_json, interval
from paper.tables.families import BASELINE, BF16, OURS
from paper.tables.pace import SpeedUp, best, curve, first_reached, log_ratios, speed_up
from paper.tables.plateaus import SHARES
from paper.tuning import AS_IS, Changes, Choice, choose, trials
from paper.words import ENGINES, right

TITLE = "10. Words"
MODEL, REWARD = "mini-text", "ocr"
SEEDS = (1, 2, 3)
ITERATIONS = 60
EVERY = 2
CHANGES: Changes = {"explore.prompts": 8, "evaluate.fidelity_every": 20}
"""Settings of all runs. The processor reads every image: most of a run's time."""


class Family(NamedTuple):
    """A recipe with changes, and the one whose trials choose its learning rate."""

    recipe: str
    tuned: str
    changes: Changes = AS_IS


FAMILIES = {
    BASELINE: Family("diffusionnft", TUNED_FOR),
    BF16: Family("naive_scaling", TUNED_FOR),
    OURS: Family("sol_rl", TUNED_FOR),
    "AWM": Family("awm", "awm"),
    "AWM two-stage": Family("awm_two_stage", "awm"),
    "FlowGRPO": Family("flowgrpo", "flowgrpo", authors.SETTINGS),
}
"""24-in-24 BF16 is DiffusionNFT."""
VARIANTS: dict[str, tuple[Changes, tuple[str, ...]]] = {
    "guidance 2": ({"guidance": 2.0, "iterations": 30}, (BASELINE, OURS, "AWM")),
    "rate 0.001": (
        {
            "optimizer.learning_rate": 0.001,
            "optimizer.cosine_iterations": ITERATIONS,
            "iterations": 24,
            "evaluate.every": 1,
        },
        (BASELINE, BF16, OURS),
    ),
}
"""Shorter runs of some families: with guidance, and at AWM's learning rate."""
TUNED: dict[str, Changes] = {family.tuned: family.changes for family in FAMILIES.values()}
"""Recipes that have trials, with their changes."""


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """The trials, and the runs of each family whose learning rate is known; `whole`: the runs of all."""
    own = on_text(context)
    found = [
        one for recipe, changes in TUNED.items() for one in trials(own.programme, recipe, own.results, changes).values()
    ]
    for name in FAMILIES:
        found += runs_of(own, name, whole=whole)
    for changes, names in VARIANTS.values():
        found += [one for name in names for one in runs_of(own, name, changes, whole=whole)]
    return found


def on_text(context: Context) -> Context:
    """The context with the programme of this table, whatever model and reward the others have."""
    programme = replace(
        context.programme,
        model=MODEL,
        reward=REWARD,
        rewards=(REWARD,),
        judges=(),
        seeds=SEEDS,
        iterations=ITERATIONS,
        every=EVERY,
        unprepared=None,
        changes={**CHANGES, **context.programme.changes},
    )
    return replace(context, programme=programme)


def runs_of(own: Context, name: str, changes: Changes = AS_IS, *, whole: bool = False) -> list[Experiment]:
    """Runs of a family with changes; none while its learning rate is not known, unless `whole` takes any."""
    family = FAMILIES[name]
    choice = _choice(own, family)
    if choice is None and not whole:
        return []
    rate = {"optimizer.learning_rate": choice.rate} if choice else {}
    falling = {"optimizer.cosine_iterations": changes.get("iterations", own.programme.iterations)}
    return own.programme.over_seeds(family.recipe, {**family.changes, **falling, **rate, **changes})


def section(context: Context) -> Section | None:
    """The table; None before three seeds of every family are finished."""
    own = on_text(context)
    runs = {name: runs_of(own, name) for name in FAMILIES}
    finished = {name: own.finished(one) for name, one in runs.items()}
    if min(map(len, finished.values())) < len(SEEDS):
        return None
    prices, others = _prices(own), [name for name in FAMILIES if name != BASELINE]
    pace = {
        name: {
            share: speed_up(log_ratios(own, runs[name], runs[BASELINE], REWARD, share, height=best)) for share in SHARES
        }
        for name in others
    }
    compute = {
        f"{name}, {clock}": {share: one.over(price) for share, one in pace[name].items()}
        for name in others
        for clock, price in prices[name].items()
    }
    base, *_ = finished[BASELINE]
    rows = [
        [
            "base",
            f"{base.curve[0][1][REWARD]:.3f}",
            "",
            "",
            *(_read(own, runs[BASELINE], one, "before") for one in ENGINES),
        ],
        *(_row(own, name, runs[name], finished) for name in FAMILIES),
    ]
    shares = [f"{share:.0%}" for share in SHARES]
    variants = _variants(own)
    rates = {
        name: choice.rate
        for name, family in FAMILIES.items()
        if family.recipe == family.tuned and (choice := _choice(own, family))
    }
    lines = [
        f"{MODEL} trained on the reward `{REWARD}` for {own.programme.iterations} iterations of",
        f"{base.config.explore.prompts} prompts, {len(SEEDS)} seeds, no guidance. {BASELINE} is DiffusionNFT;",
        "FlowGRPO has the settings of table 8. The learning rate falls to 0 along half a cosine, from the rate that",
        "trials chose as for table 1:",
        f"{', '.join(f'{rate:g} for {name}' for name, rate in rates.items())}.",
        "Two-stage families have the rate of the algorithm.",
        "",
        f"Best: highest mean reward of an evaluation, of which there is one every {own.programme.every} iterations.",
        f"To 95 %: mean iterations after which a seed has 95 % of the best gain of {BASELINE} with the same seed.",
        "Exact: share of words that an engine reads without a mistake, in one image of each held-out prompt, by the",
        "averaged weights at the end. RapidOCR gives the reward; no reward asks Tesseract.",
        "",
        *table(["family", "end", "best", "to 95 %", *(f"exact, {name}" for name in ENGINES.values())], rows),
        "",
        f"× iterations to a share of the best gain of {BASELINE} with the same seed: its own over those of the family.",
        "",
        *table(["family", *shares], [[name, *map(str, found.values())] for name, found in pace.items()]),
        "",
        "× compute to 95 %, at the shape of a large model: with the noise levels that these runs train, and with those",
        "that the large model's preset of the recipe trains.",
        "",
        *table(
            ["family", *prices[BASELINE]],
            [[name, *(str(compute[f"{name}, {clock}"][0.95]) for clock in prices[name])] for name in others],
        ),
        "",
        *_variant_lines(variants),
        *(
            line
            for name in FAMILIES
            for line in ("", f"{name}:", "", f"![the first held-out words, before and after]({picture_of(name)})")
        ),
    ]
    return Section(
        TITLE,
        lines,
        {
            "base": {engine: _json_read(own, runs[BASELINE], engine, "before") for engine in ENGINES},
            "families": {name: _figures(own, name, runs[name], finished) for name in FAMILIES},
            "curves": {name: _mean_curve(found) for name, found in finished.items()},
            "cost of an iteration": prices,
            "iterations": {name: _json(found) for name, found in pace.items()},
            "compute": {name: _json(found) for name, found in compute.items()},
            "variants": {
                " ".join(key): {
                    "begin": one.begin,
                    **{name: as_json(found) for name, found in one.figures.items()},
                    "iterations": _json(one.pace),
                }
                for key, one in variants.items()
            },
        },
    )


class Variant(NamedTuple):
    """Figures of a family in a variant: base reward, estimates, and its pace against the variant's baseline."""

    begin: float
    figures: Mapping[str, Estimate | None]
    pace: Mapping[float, SpeedUp]


def _variants(own: Context) -> dict[tuple[str, str], Variant]:
    """Variants with all seeds, by name and family."""
    found = {}
    for label, (changes, names) in VARIANTS.items():
        runs = {name: runs_of(own, name, changes) for name in names}
        finished = {name: own.finished(one) for name, one in runs.items()}
        if min(map(len, finished.values())) < len(SEEDS):
            continue
        for name in names:
            found[label, name] = Variant(
                finished[name][0].curve[0][1][REWARD],
                _estimates(name, finished) | {one: _accuracy(own, runs[name], one, "after") for one in ENGINES},
                {
                    share: speed_up(log_ratios(own, runs[name], runs[BASELINE], REWARD, share, height=best))
                    for share in SHARES
                },
            )
    return found


def _variant_lines(variants: Mapping[tuple[str, str], Variant]) -> list[str]:
    if not variants:
        return []
    rows = [
        [
            *key,
            f"{one.begin:.3f}",
            *(interval(found) if (found := one.figures[name]) else "never" for name in ("best", "at 95%")),
            *("" if key[1] == BASELINE else str(one.pace[share]) for share in (0.5, 0.95)),
            *(_share(one.figures[engine]) for engine in ENGINES),
        ]
        for key, one in variants.items()
    ]
    head = ["variant", "family", "base", "best", "to 95 %", "× iterations, 50 %", "× iterations, 95 %"]
    return [
        f"Variants, each with its own {BASELINE}: guidance in sampling and evaluating, at the rates above, and all",
        "families at AWM's learning rate. Iterations and exact words as above.",
        "",
        *table([*head, *(f"exact, {name}" for name in ENGINES.values())], rows),
        "",
    ]


def _choice(own: Context, family: Family) -> Choice | None:
    return choose(own.programme, family.tuned, own.runs, own.results, TUNED[family.tuned])


def picture_of(name: str) -> str:
    """Picture of a family's first prompts, relative to the page."""
    return f"paper/text-{name.lower().replace(' ', '-')}.png"


def _prices(own: Context) -> dict[str, dict[str, float]]:
    """Compute of an iteration by family and clock, in iterations of the baseline."""
    clocks: dict[str, Callable[[Family], float]] = {}
    for shape, name in SHAPES.items():
        seconds, short = costs_of(shape, own.results).seconds, name.partition(" ")[0]

        def as_here(family: Family, seconds: Any = seconds) -> float:
            return float(seconds(passes_of_iteration(_config(own, family))))

        def as_there(family: Family, seconds: Any = seconds, shape: str = shape) -> float:
            return float(seconds(passes_of_iteration(_config(own, family), preset_fraction(shape, family.recipe))))

        clocks |= {short: as_here, f"{short}, its preset": as_there}
    return {
        name: {label: clock(family) / clock(FAMILIES[BASELINE]) for label, clock in clocks.items()}
        for name, family in FAMILIES.items()
    }


def _config(own: Context, family: Family) -> Any:
    return own.programme.experiment(family.recipe, SEEDS[0], family.changes).config


def _row(own: Context, name: str, runs: list[Experiment], finished: Mapping[str, list[Finished]]) -> list[str]:
    figures = _estimates(name, finished)
    reached = figures["at 95%"]
    return [
        name,
        *(interval(one) for key in ("end", "best") if (one := figures[key])),
        f"{reached.mean:.1f}" if reached else "never",
        *(_read(own, runs, engine, "after") for engine in ENGINES),
    ]


def _estimates(name: str, finished: Mapping[str, list[Finished]]) -> dict[str, Estimate | None]:
    """End and best of the reward, and iterations to 95 % of the baseline's best gain if all seeds reach it."""
    runs = finished[name]
    at = []
    for run, goal in zip(runs, finished[BASELINE], strict=True):
        start, points = run.curve[0][1][REWARD], curve(goal, REWARD)
        at.append(first_reached(curve(run, REWARD), start + 0.95 * (best(points) - start)))
    reached = [one for one in at if one is not None]
    return {
        "end": over_seeds(np.array([run.after[REWARD].mean() for run in runs])),
        "best": over_seeds(np.array([best(curve(run, REWARD)) for run in runs])),
        "at 95%": over_seeds(np.array(reached)) if len(reached) == len(at) else None,
    }


def _figures(own: Context, name: str, runs: list[Experiment], finished: Mapping[str, list[Finished]]) -> dict[str, Any]:
    return {
        **{key: as_json(one) for key, one in _estimates(name, finished).items()},
        **{engine: _json_read(own, runs, engine, "after") for engine in ENGINES},
    }


def _accuracy(own: Context, runs: list[Experiment], engine: str, when: str) -> Estimate | None:
    """Share of words that an engine reads exactly; None unless all finished runs were read."""
    found = own.finished(runs)
    if not all(run.words for run in found):
        return None
    return over_seeds_and_prompts(np.stack([right(run, engine, when) for run in found]))


def _read(own: Context, runs: list[Experiment], engine: str, when: str) -> str:
    return _share(_accuracy(own, runs, engine, when), limits=when == "after")


def _share(found: Estimate | None, *, limits: bool = True) -> str:
    if found is None:
        return "not read"
    return f"{100 * found.mean:.0f} %{f' [{100 * found.low:.0f}, {100 * found.high:.0f}]' if limits else ''}"


def _json_read(own: Context, runs: list[Experiment], engine: str, when: str) -> dict[str, Any] | None:
    return as_json(_accuracy(own, runs, engine, when))


def _mean_curve(runs: list[Finished]) -> list[tuple[int, float]]:
    """Reward by iteration, a mean over seeds."""
    curves = [curve(run, REWARD) for run in runs]
    return [(points[0][0], float(np.mean([value for _, value in points]))) for points in zip(*curves, strict=True)]


def _json(found: Mapping[float, SpeedUp]) -> dict[str, Any]:
    """The speed-ups that all seeds have."""
    ratios = {share: one.ratio for share, one in found.items()}
    return {f"{share:.0%}": as_json(one if one and one.seeds == len(SEEDS) else None) for share, one in ratios.items()}
