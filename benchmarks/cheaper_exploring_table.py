"""Results page of `cheaper_exploring.py`."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from caveats import PREPARED_FOR_NVFP4
from plan_fidelity_table import ALLOWED, FITTED, STEPS, TRUE_STEPS
from support.precisions import named

HALF = FITTED - 1
"""Steps before pruning."""
REFERENCE = 48
"""Candidates kept halfway by the plan that the ideas are compared with."""
SELECTED = 12
"""Candidates selected from either end."""
SAVED = 0.05
"""Share of the reference's candidate steps that an idea must save to be proposed."""
SHARE = 0.75
"""Share of all candidates that adaptive groups spend on average."""
ALIKE = "all alike"
"""Instead of a rule: every prompt gets the same number of candidates."""
KNOWN = "known: "
"""Prefix of rules that no plan can follow, because they use true scores."""
CHANGES = ("larger_change", "overall_change")
"""Fields of a row of uneven halves."""

Row = Mapping[str, Any]

ABOUT = (
    "By `{command}`: {numerics} compared with BF16 at {true_steps} steps, {prompts} held-out prompts × {candidates} "
    "candidates, {models}, four rewards, on the device `{device}`. The reference takes {fitted} fitted steps and keeps "
    "{reference} candidates after step {half}; the noise levels of its steps were chosen on {chosen_on} training "
    "prompts. *Worse* is the increase of the mean true rank of the {selected} candidates selected as best and of those "
    "selected as worst, mean of both. All figures are means over models and rewards, in the same prompts; brackets "
    "are 95 % intervals over prompts. As for [cheaper plans](plan_fidelity.md), one pass over all candidates evaluates "
    "every plan. Many rows are compared, and their intervals are not widened for that."
)
SURE = (
    "Of the candidates kept halfway, the *sure* most extreme at either end are selected as they are; the others are "
    "refined by the last step and fill the remaining places. *Steps*: candidate steps, relative to {steps} unpruned "
    "ones; in brackets, relative to the reference. *Images*: images decoded and scored, relative to the reference. "
    "*Maximum*: over models, rewards, best and worst. *Than the reference*: paired. *Than pruning*: than a plan of the "
    "same steps that keeps fewer and refines all of them. *By halfway scores*: than the reference, if the sure ones "
    "are not selected outright, but compared by their score halfway with the final scores of the others."
)
UNEVEN = (
    "Of the candidates kept halfway, not half are the best ones. *Larger*: change of the larger of the two increases "
    "against even halves, found for each model and reward, or *overall*, from the means over all of them."
)
ADAPTIVE = (
    "Every prompt gets a first batch. Then, within each model and reward, a rule picks the prompts that get all "
    "{candidates}, so that {share:.0%} of all candidates are spent on average. *Contrast*: true score of the selected "
    "best minus that of the worst, against {equal} candidates for every prompt (paired), in standard deviations of "
    "all images of the base, and of the prompt's own images. `global_std`, the default, divides advantages by one "
    "deviation for all prompts; DanceGRPO divides them by each group's. *Pairs*: better and worse with the whole "
    "interval. Nothing is pruned here, which favours small groups. The prompts' own deviations vary "
    "by {varies:.0%} (standard deviation over mean). Means over {orders} orders of the candidates."
)


def table(result: Mapping[str, Any]) -> str:
    """Markdown page of the content of cheaper_exploring.json."""
    facts = {
        **result,
        "models": ", ".join(result["models"]),
        "numerics": named(list(result["numerics"].items())),
        "true_steps": TRUE_STEPS,
        "steps": STEPS,
        "fitted": FITTED,
        "half": HALF,
        "reference": REFERENCE,
        "selected": SELECTED,
        "share": SHARE,
        "equal": round(SHARE * result["candidates"]),
    }
    lines = ["# Three ideas for cheaper exploring", "", *wrap(ABOUT.format_map(facts), 118), "", *PREPARED_FOR_NVFP4]
    for title, about, name, part in (
        ("Only the doubtful are refined", SURE, "sure", _sure),
        ("Uneven halves", UNEVEN, "uneven", _uneven),
        ("Adaptive groups", ADAPTIVE, "adaptive", _adaptive),
    ):
        lines += ["", f"## {title}", "", *wrap(about.format_map(facts), 118)]
        for precision in result["precisions"]:
            rows = [row for row in result[name] if row["precision"] == precision]
            lines += ["", *([f"{precision.upper()}:", ""] if len(result["precisions"]) > 1 else []), *part(rows)]
    return "\n".join(lines) + "\n"


def _sure(rows: Sequence[Row]) -> Iterator[str]:
    yield "| kept | sure | steps | images | worse | maximum | than the reference | than pruning | by halfway scores |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row["selected"]:
            by_halfway = [
                _said(r["change"]["both"])
                for r in rows
                if (r["keep"], r["sure"], r["selected"]) == (row["keep"], row["sure"], False)
            ]
            yield (
                f"| {row['keep']} | {row['sure']} | {row['cost']:.1%} ({0 - row['saved']:+.1%}) | {row['images']:.0%} "
                f"| {_said(row['worse']['both'])} | {row['most_worse']:+.2f} | {_said(row['change']['both'])} "
                f"| {_said(row['than_pruning']['both']) if row['sure'] and row['than_pruning'] else ''} "
                f"| {''.join(by_halfway)} |"
            )
    yield ""
    yield from wrap(" ".join(_sure_verdict(rows)), 118)


def _sure_verdict(rows: Sequence[Row]) -> Iterator[str]:
    enough = [row for row in rows if row["saved"] >= SAVED]
    least = min(enough, key=lambda row: row["change"]["both"][0])
    yield (
        f"{len(enough)} plans save at least {SAVED:.0%} of the reference's steps. "
        f"{sum(not row['proposed'] for row in enough)} of them are worse than it with the whole interval. "
        f"The least increase is {_said(least['change']['both'])}, of {_plan(least)}: {least['saved']:.1%} fewer steps, "
        f"{1 - least['images']:.0%} fewer images."
    )
    alike = [row for row in rows if row["sure"] and row["selected"] and row["than_pruning"]]
    better = [row for row in alike if row["than_pruning"]["both"][2] < 0]
    yield (
        f"At equal steps, {len(better)} of {len(alike)} plans with sure ones are better than pruning alone, with the "
        f"whole interval."
    )
    same = [row for row in alike if row["saved"] == 0]
    if same:
        best = min(same, key=lambda row: row["change"]["both"][0])
        yield f"At the reference's own steps, {_plan(best)} change its ranks by {_said(best['change']['both'])}."


def _plan(row: Row) -> str:
    way = "" if row["selected"] else ", compared by halfway scores"
    return f"{row['keep']} kept with {row['sure']} sure at either end{way}"


def _uneven(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        f"| kept | best + worst | best worse | worst worse | both | maximum | at most {ALLOWED:g} worse "
        f"| larger | larger, overall |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        changes = [_said(row[name]) if row["best"] * 2 != row["keep"] else "" for name in CHANGES]
        yield (
            f"| {row['keep']} | {_halves(row)} | {_said(row['worse']['top'])} | {_said(row['worse']['bottom'])} "
            f"| {_said(row['worse']['both'])} | {row['most_worse']:+.2f} | {row['within']} of {row['settings']} "
            f"| {' | '.join(changes)} |"
        )
    yield ""
    lower = {name: [_halves(row) for row in rows if row[name][2] < 0] for name in CHANGES}
    each, overall = (", ".join(found) or "none" for found in lower.values())
    yield from wrap(
        f"Splits that lower the larger increase with the whole interval, for each model and reward: {each}; overall: "
        f"{overall}.",
        118,
    )


def _halves(row: Row) -> str:
    return f"{row['best']} + {row['keep'] - row['best']}"


def _adaptive(rows: Sequence[Row]) -> Iterator[str]:
    yield "| first batch | who gets all | mean | contrast, base's deviations | pairs | group's deviations | pairs |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [f"{_said(row[unit], 3)} | {' / '.join(map(str, row[f'{unit}_pairs']))}" for unit in ("base", "group")]
        yield f"| {row['first']} | {row['rule']} | {row['mean']:.1f} | {' | '.join(cells)} |"
    yield ""
    yield from wrap(" ".join(_adaptive_verdict(rows)), 118)


def _adaptive_verdict(rows: Sequence[Row]) -> Iterator[str]:
    known = [row for row in rows if row["rule"].startswith(KNOWN)]
    usable = [row for row in rows if row["rule"] != ALIKE and row not in known]
    for unit, name in (("base", "the base's deviations"), ("group", "the group's own")):
        best, bound = (max(some, key=lambda row: row[unit][0]) for some in (usable, known))
        pay = sum(row[unit][1] > 0 for row in usable)
        yield (
            f"In {name}, {pay} of {len(usable)} rules pay with the whole interval. The best, “{best['rule']}” after "
            f"{best['first']}, gains {_said(best[unit], 3)}; known true scores would allow {_said(bound[unit], 3)}."
        )


def _said(interval: Sequence[float], digits: int = 2) -> str:
    mean, low, high = (f"{value:+.{digits}f}" for value in interval)
    return f"{mean} [{low}, {high}]"
