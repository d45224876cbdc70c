"""Page of `plan_fidelity.py`."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from support.caveats import PREPARED_FOR_NVFP4
from support.precisions import QUANTISED, named

TRUE_STEPS, STEPS, FITTED = 10, 6, 4
CHECKED = 2
"""Prompts whose groups an earlier version also really pruned."""
ALLOWED = 1.0
"""Largest allowed increase of the mean true rank of the best and of the worst 12 over six steps without pruning."""

WHOLE, FP8 = "whole", "fp8"
"""How the images that are scored are decoded: as trained, or in FP8."""
NEXT = 2
"""Cheaper plans named beside the cheapest that is allowed."""

Row = dict[str, Any]
Plan = tuple[float, int, int, int]
"""(share of the steps spent, steps, steps before pruning, candidates kept)."""

DECODED_FP8 = (
    "*Decoded in FP8*: images are scored as the decoder makes them with its 3×3 convolutions in FP8, except the first "
    "and the last; only without pruning. The miniatures' decoders have too few channels for the FP8 kernels, so codes "
    "are multiplied in float32. True ranks are of images decoded in the decoder's own precision."
)
CHEAPEST = (
    "Of each model, precision and decoder, the plan of the fewest steps by which, for every reward, the best and "
    f"the worst are at most {ALLOWED:g} worse with the whole interval. Steps do not count the cost of decoding, "
    "which FP8 lowers where its kernels run. *Next cheaper*: by how much, and for how "
    f"many rewards, the upper end of the interval exceeds {ALLOWED:g}; at most {NEXT} plans, and none that exceeds "
    "it by as much as a cheaper one. Many plans are compared, and their intervals are not widened for that."
)


def page(result: Mapping[str, Any]) -> str:
    """Markdown page of the content of plan_fidelity.json: the cheapest plans, then all plans."""
    rows = result["rows"]
    along = {
        model: ", ".join(f"{sigma:g}" for sigma in solver["sigmas"]) for model, solver in result["solvers"].items()
    }
    off = [
        f"{model} {precision.upper()} {value:.2g}"
        for model, each in result.get("off", {}).items()
        for precision, value in each.items()
    ]
    lines = [
        "# Fidelity of cheaper exploration plans",
        "",
        f"By `{result['command']}`: {named(list(result['numerics'].items()))} compared with BF16",
        f"at {TRUE_STEPS} steps, {result['prompts']} held-out prompts × {result['candidates']} candidates, on the",
        f"device `{result['device']}`. A plan takes {STEPS} steps ({_said(result['solver'])}), or",
        f"{FITTED} steps fitted to the model. Pruning keeps the candidates with the most extreme rewards of the image",
        "predicted halfway. Worse: increase of the mean true rank of the 12 candidates selected as best (worst) over",
        f"{STEPS} unpruned steps at the same precision, paired over prompts, with its 95 % interval. Steps:",
        f"candidate steps spent, relative to {STEPS} unpruned ones; decoding and scoring halfway, once per candidate,",
        "is not included.",
        *(["", *wrap(DECODED_FP8, 118)] if any(row["decoded"] == FP8 for row in rows) else []),
        "",
        *([QUANTISED[result.get("layers", "own")], ""] if "nvfp4" in result["numerics"] else []),
        *PREPARED_FOR_NVFP4,
        "",
        "## Cheapest plan",
        "",
        *wrap(CHEAPEST, 118),
        "",
        *_cheapest(rows),
        "",
        "## All plans",
        "",
        *_plans(rows),
        "",
        "The larger of the means for the best and the worst; the JSON file has both, for each model and reward. The",
        f"noise levels of the fitted steps were chosen on {result['chosen_on']} training prompts:",
        f"{_said(along, '; ')}.",
        "",
        "All plans are evaluated from one pass.",
    ]
    if off:
        lines[-1] += f" The groups of {CHECKED} prompts were also really pruned; their scores"
        lines.append(f"differ by up to this many standard deviations of the group: {', '.join(off)}.")
    return "\n".join(lines) + "\n"


def _cheapest(rows: Sequence[Row]) -> Iterator[str]:
    """A row per model, precision and decoder."""
    yield "| model | precision | decoded | cheapest plan | steps | largest increase | next cheaper |"
    yield "|---|---|---|---|---|---|---|"
    groups: dict[tuple[str, str, str], dict[Plan, list[Row]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["precision"], row["decoded"]), {}).setdefault(_plan(row), []).append(row)
    for (model, precision, how), plans in groups.items():
        largest = {
            plan: max((i for row in own for i in row["worse"].values()), key=_upper) for plan, own in plans.items()
        }
        ordered = sorted(plans, key=lambda plan: (plan[0], _upper(largest[plan])))
        chosen = next((plan for plan in ordered if all(row["surely_within"] for row in plans[plan])), None)
        said = (
            "none |  | " if chosen is None else f"{_name(*chosen[1:])} | {chosen[0]:.0%} | {_interval(largest[chosen])}"
        )
        missed: list[Plan] = []
        for plan in ordered:
            if chosen is not None and plan[0] >= chosen[0]:
                break
            if not missed or _upper(largest[plan]) < _upper(largest[missed[-1]]):
                missed.append(plan)
        others = [
            f"{_name(*plan[1:])} ({plan[0]:.0%}): by {_upper(largest[plan]) - ALLOWED:.2f}, "
            f"{sum(not row['surely_within'] for row in plans[plan])} of {len(plans[plan])}"
            for plan in missed[: -NEXT - 1 : -1]
        ]
        yield f"| {model} | {precision.upper()} | {how} | {said} | {'; '.join(others)} |"


def _plans(rows: Sequence[Row]) -> list[str]:
    """A row per plan and precision, over all models and rewards, the cheapest first."""
    count = len({(row["model"], row["reward"]) for row in rows})
    lines = [
        f"| plan | precision | steps | worse, mean | worse, maximum of {count} "
        f"| at most {ALLOWED:g} worse | with whole interval | worse than unpruned, maximum |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[Plan, str], dict[str, list[Row]]] = {}
    for row in rows:
        if not is_reference(row):
            groups.setdefault((_plan(row), row["decoded"]), {}).setdefault(row["precision"], []).append(row)
    for (plan, how), by_precision in sorted(groups.items()):
        for precision, group in by_precision.items():
            worse = [_largest(row, "worse") for row in group]
            own = f"{max(_largest(row, 'worse_than_unpruned') for row in group):+.2f}" if plan[2] < plan[1] else ""
            lines.append(
                f"| {_name(*plan[1:], how)} | {precision.upper()} | {plan[0]:.0%} | {sum(worse) / len(worse):+.2f} "
                f"| {max(worse):+.2f} | {sum(row['within'] for row in group)} of {len(group)} "
                f"| {sum(row['surely_within'] for row in group)} | {own} |"
            )
    return lines


def is_reference(row: Row) -> bool:
    """Whether a row is of the plan that all are compared with."""
    return row["after"] == STEPS and row["decoded"] == WHOLE


def _plan(row: Row) -> Plan:
    return row["cost"], row["steps"], row["after"], row["keep"]


def _name(steps: int, after: int, keep: int, how: str = WHOLE) -> str:
    long = "" if steps == STEPS else f"{steps} fitted steps"
    name = ", ".join(filter(None, [long, f"after {after} keep {keep}" if after < steps else ""])) or "unpruned"
    return name + {WHOLE: "", FP8: ", decoded in FP8"}[how]


def _interval(values: Sequence[float]) -> str:
    mean, low, high = values
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _upper(interval: Sequence[float]) -> float:
    return interval[2]


def _largest(row: Row, which: str) -> float:
    """Larger of the means for the best and the worst."""
    return max(mean for mean, _, _ in row[which].values())


def _said(values: Mapping[str, str], between: str = ", ") -> str:
    return between.join(f"{name} {value}" for name, value in values.items())
