"""Results page of `plan_fidelity.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

from caveats import PREPARED_FOR_NVFP4
from support.precisions import named

TRUE_STEPS, STEPS, FITTED = 10, 6, 4
CHECKED = 2
"""Prompts whose groups are also really pruned."""
ALLOWED = 1.0
"""Largest allowed increase of the mean true rank of the best and of the worst 12 over six steps without pruning."""

Row = dict[str, Any]


def table(result: Mapping[str, Any]) -> str:
    """Markdown tables of the content of plan_fidelity.json: a row per plan and precision, then all rows."""
    rows = result["rows"]
    along = {
        model: ", ".join(f"{sigma:g}" for sigma in solver["sigmas"]) for model, solver in result["solvers"].items()
    }
    off = [
        f"{model} {precision.upper()} {value:.2g}"
        for model, each in result["off"].items()
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
        "",
        *PREPARED_FOR_NVFP4,
        "",
        *_plans(rows),
        "",
        "The table above gives the larger of the means for the best and the worst; the table below gives both. The",
        f"noise levels of the fitted steps were chosen on {result['chosen_on']} training prompts:",
        f"{_said(along, '; ')}.",
        "",
        "![increase in true rank over steps spent](plan_fidelity.png)",
        "",
        *_every(rows),
        "",
        f"All plans are evaluated from one pass. The groups of {CHECKED} prompts were also really pruned; their scores",
        f"differ by up to this many standard deviations of the group: {', '.join(off)}.",
        "Spearman is over the candidates that were not pruned, so it is not comparable between plans.",
    ]
    return "\n".join(lines) + "\n"


def _plans(rows: Sequence[Row]) -> list[str]:
    """A row per plan and precision, over all models and rewards, the cheapest first."""
    count = len({(row["model"], row["reward"]) for row in rows})
    lines = [
        f"| plan | precision | steps | worse, mean | worse, maximum of {count} "
        f"| at most {ALLOWED:g} worse | with whole interval | worse than unpruned, maximum |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[float, int, int, int], dict[str, list[Row]]] = {}
    for row in rows:
        if row["cost"] < 1:
            plan = (row["cost"], row["steps"], row["after"], row["keep"])
            groups.setdefault(plan, {}).setdefault(row["precision"], []).append(row)
    for plan, by_precision in sorted(groups.items()):
        for precision, group in by_precision.items():
            worse = [_largest(row, "worse") for row in group]
            own = f"{max(_largest(row, 'worse_than_unpruned') for row in group):+.2f}" if plan[2] < plan[1] else ""
            lines.append(
                f"| {_name(*plan[1:])} | {precision.upper()} | {plan[0]:.0%} | {sum(worse) / len(worse):+.2f} "
                f"| {max(worse):+.2f} | {sum(row['within'] for row in group)} of {len(group)} "
                f"| {sum(row['surely_within'] for row in group)} | {own} |"
            )
    return lines


def _every(rows: Sequence[Row]) -> list[str]:
    """All rows."""
    lines = [
        "| model | precision | reward | plan | steps "
        "| true ranks | best 12 worse | worst 12 worse | Spearman | within |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        whole = r["after"] == STEPS
        said = ["" if whole else f"{m:+.2f} [{a:+.2f}, {b:+.2f}]" for m, a, b in r["worse"].values()]
        lines.append(
            f"| {r['model']} | {r['precision'].upper()} | {r['reward']} | {_name(r['steps'], r['after'], r['keep'])} "
            f"| {r['cost']:.0%} | {r['top_rank']:.1f} / {r['bottom_rank']:.1f} "
            f"| {said[0]} | {said[1]} | {r['spearman']:.3f} | {'' if whole else 'yes' if r['within'] else 'no'} |"
        )
    return lines


def _name(steps: int, after: int, keep: int) -> str:
    """Short name of a plan."""
    long = "" if steps == STEPS else f"{steps} fitted steps"
    return ", ".join(filter(None, [long, f"after {after} keep {keep}" if after < steps else ""])) or "unpruned"


def _largest(row: Row, which: str) -> float:
    """Larger of the means for the best and the worst."""
    return max(mean for mean, _, _ in row[which].values())


def _said(values: Mapping[str, str], between: str = ", ") -> str:
    return between.join(f"{name} {value}" for name, value in values.items())
