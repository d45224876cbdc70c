"""Table 3: whether training on quantised samples degrades, also in long runs and on weights not prepared for NVFP4."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from support.results import table

from paper.experiments import Experiment
from paper.finished import Finished
from paper.intervals import Estimate, Values, over_seeds, over_seeds_and_prompts
from paper.tables import families
from paper.tables.common import (
    NOT_RUN,
    Context,
    Section,
    as_json,
    ceiling_text,
    difference,
    gain,
    gain_text,
    interval,
    pairs,
    rate_text,
    signed,
)
from paper.tables.pace import SpeedUp, best, curve, last, log_ratios, speed_up

TITLE = "3. Training on quantised samples"
FAMILIES = {"24-in-96 BF16": "naive_scaling", "naive quant": "naive_quant", "Sol-RL": "sol_rl"}
REFERENCE = "24-in-96 BF16"
BASELINE = "diffusionnft"


def settings(context: Context) -> dict[str, Mapping[str, Any]]:
    """Changes of each part of the table: shorter and longer runs, and other weights."""
    programme = context.programme
    found: dict[str, Mapping[str, Any]] = {
        f"{programme.model}, {programme.iterations} iterations": {},
        f"{programme.model}, {programme.long} iterations": {"iterations": programme.long},
    }
    if programme.unprepared is not None:
        found[f"{programme.unprepared}, {programme.iterations} iterations"] = {"model": programme.unprepared}
    return found


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """Every family in every part, and the trials that choose the learning rate."""
    return context.after_trials(FAMILIES.values(), [(None, one) for one in settings(context).values()], whole=whole)


def section(context: Context) -> Section:
    """The table."""
    programme = context.tuned
    rows, data = [], {}
    for part, changes in settings(context).items():
        reference = programme.over_seeds(FAMILIES[REFERENCE], changes)
        for name, recipe in FAMILIES.items():
            runs = programme.over_seeds(recipe, changes)
            own = gain(context, runs, programme.reward)
            against = difference(context, runs, reference, programme.reward)
            judges = [gain(context, runs, judge) for judge in programme.judges]
            finished = context.finished(runs)
            lost = over_seeds(np.array([fall(run, programme.reward) for run in finished])) if finished else None
            said = "" if name == REFERENCE else signed(against)
            shown = gain_text(context, runs, programme.reward)
            rows.append([part, name, shown, said, signed(lost), *map(signed, judges)])
            data[f"{part}, {name}"] = {"gain": as_json(own), "less": as_json(against), "fall": as_json(lost)}
    judged = [f"gain in {judge}, sd" for judge in programme.judges]
    head = ["weights, length", "family", "gain, sd", f"less {REFERENCE}", "fall from its best, sd", *judged]
    lines = [
        *rate_text(context),
        f"Trained on {programme.reward}. Fall: how far the last evaluation lies below the highest of the run, with its",
        "interval over seeds; a run that still rises has 0. The paper's Figure 3b shows naive quantisation degrade",
        "while Sol-RL does not.",
        *ceiling_text(context, [programme.reward]),
        "",
        *table(head, rows),
    ]
    damaged, compared = damage(context)
    lines += ["", *damaged]
    ranks = {part: ranks_along(context, changes) for part, changes in settings(context).items()}
    lines += ["", *_table_of_ranks(ranks)]
    if programme.unprepared is None:
        lines += ["", f"Weights that were not prepared for NVFP4: {NOT_RUN}; `--unprepared MODEL` names them."]
    stored = {part: {version: as_json(one) for version, one in found.items()} for part, found in ranks.items()}
    return Section(TITLE, lines, {"families": data, "naive quant": compared, "ranks of Sol-RL": stored})


def damage(context: Context) -> tuple[list[str], dict[str, Any]]:
    """Lines and figures: scores of rounded samples of the base, and naive quantisation against Sol-RL."""
    programme, found = context.tuned, dict[str, tuple[Values, Values, SpeedUp]]()
    for part, (reward, changes) in families.parts(context).items():
        bf16, naive, ours = (programme.over_seeds(recipe, changes, reward=reward) for recipe in FAMILIES.values())
        goal = programme.over_seeds(BASELINE, changes, reward=reward)
        both, samples = pairs(context, naive, ours, reward), first_scores(context, naive, bf16, reward)
        if both and len(samples):
            pace = speed_up(log_ratios(context, naive, ours, reward, goal=goal))
            found[part] = (samples, both[0] - both[1], pace)
    own = [found[reward] for reward in families.rewards(context) if reward in found]
    if len({one[1].shape for one in own}) == 1:
        samples, ahead = (np.mean([one[place] for one in own], axis=0) for place in (0, 1))
        pace = families.over_rewards(context, families.NAIVE, families.OURS, 1.0)
        found[f"mean of all, {programme.model}"] = (samples, ahead, pace)
    figures = {
        part: (over_seeds(samples), over_seeds_and_prompts(ahead), pace.ratio)
        for part, (samples, ahead, pace) in found.items()
    }
    rows = [
        [part, signed(samples), signed(ahead), NOT_RUN if ratio is None else interval(ratio)]
        for part, (samples, ahead, ratio) in figures.items()
    ]
    lines = [
        "Are the samples damaged? The paper's premise is that images in NVFP4 are visibly worse. Samples: mean score",
        "of the base's candidates in NVFP4 less that in BF16, of the same seeds, in the first iteration, with its",
        "interval over seeds. Gain and × iterations: those of naive quantisation against those of Sol-RL.",
        "",
        *table(["reward", "samples, sd", "gain less Sol-RL's, sd", "× iterations of Sol-RL"], rows),
    ]
    names = ("samples", "ahead", "iterations")
    return lines, {part: dict(zip(names, map(as_json, one), strict=True)) for part, one in figures.items()}


def first_scores(context: Context, rounded: Sequence[Experiment], exact: Sequence[Experiment], reward: str) -> Values:
    """Mean score of the candidates of the first iteration less that of exact ones, by seed that has both [seeds]."""
    found = [
        (one[0].iterations[0]["proxy_mean"] - one[1].iterations[0]["proxy_mean"]) / one[0].within[reward]
        for both in zip(rounded, exact, strict=True)
        if len(one := context.finished(both)) == len(both)
    ]
    return np.array(found)


def _table_of_ranks(found: Mapping[str, Mapping[int, Estimate]]) -> list[str]:
    """Sol-RL's ranks along the run by part, from part → iteration → Spearman correlation."""
    versions = sorted(set().union(*found.values()))
    rows = [
        [part, *("" if (one := ranks.get(version)) is None else interval(one) for version in versions)]
        for part, ranks in found.items()
    ]
    return [
        "Ranks along the run: Spearman correlation of Sol-RL's exploration with the same seeds in BF16 at full steps,",
        "by iteration, on held-out groups; intervals over seeds.",
        "",
        *(table(["weights, length", *map(str, versions)], rows) if versions else [f"Ranks: {NOT_RUN}."]),
    ]


def ranks_along(context: Context, changes: Mapping[str, Any]) -> dict[int, Estimate]:
    """Iteration → Spearman correlation of Sol-RL's exploration with these changes, over the runs that measured it."""
    runs = context.finished(context.tuned.over_seeds(FAMILIES["Sol-RL"], changes))
    found: dict[int, list[float]] = {}
    for run in runs:
        for line in run.fidelity:
            found.setdefault(line["version"], []).append(line["spearman"])
    return {version: over_seeds(np.array(values)) for version, values in found.items()}


def fall(run: Finished, reward: str) -> float:
    """Highest held-out reward of a run's evaluations less the last, in standard deviations of the base."""
    points = curve(run, reward)
    return (best(points) - last(points)) / run.within[reward]
