"""The command line and the results page of a benchmark of ranks: a row per model, reward and proxy."""

import argparse
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from solrl_core.fidelity import Fidelity

Row = dict[str, Any]
"""Names of what was measured, and the fields of `Fidelity`."""
Measure = Callable[[str, argparse.Namespace], list[Row]]
"""Measures one model."""
Table = Callable[[Sequence[Row], Mapping[str, Any]], str]
"""Markdown page of all rows; takes the settings, too."""

MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
HEADER = "Kendall | Spearman | best 4/8/12 | worst 4/8/12 | true ranks"
"""Columns of `cells`."""


def options(description: str | None, prompts: int) -> argparse.ArgumentParser:
    """The options that all such benchmarks have; `prompts` is a default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rewards", nargs="+", default=list(REWARDS))
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    return parser


def run(name: str, parser: argparse.ArgumentParser, measure: Measure, table: Table) -> None:
    """Measure all models and print the page; writes OUT/NAME.{json,md} after each model."""
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    rows: list[Row] = []
    for place, model in enumerate(args.models):
        rows += measure(model, args)
        settings["models"] = args.models[: place + 1]
        (args.out / f"{name}.json").write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(table(rows, settings))
    print(table(rows, settings))


def command(name: str, parser: argparse.ArgumentParser, settings: Mapping[str, Any]) -> str:
    """Command line of a benchmark that gives these settings."""
    words = ["python", f"benchmarks/{name}.py"]
    for key, default in vars(parser.parse_args([])).items():
        value = settings.get(key, default)
        if key != "out" and value != default:
            words += [f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def cells(found: Fidelity) -> str:
    """The columns of `HEADER`."""
    best, worst = ("/".join(f"{v:.2f}" for v in o.values()) for o in (found.top_overlap, found.bottom_overlap))
    ranks = f"{found.top_rank:.1f} / {found.bottom_rank:.1f}"
    return f"{found.kendall:.3f} | {found.spearman:.3f} | {best} | {worst} | {ranks}"


def mean(rows: Sequence[Row]) -> Fidelity:
    """The mean of each figure over rows."""

    def of(name: str) -> Any:
        values = [row[name] for row in rows]
        if isinstance(values[0], dict):
            return {size: sum(value[size] for value in values) / len(values) for size in values[0]}
        return sum(values) / len(values)

    return Fidelity(**{name: of(name) for name in Fidelity.__dataclass_fields__})
