"""The pages of evidence, docs/findings.md and docs/evidence: templates whose figures come from stored results.

`python benchmarks/evidence` fills the templates beside this file from the JSON files in benchmarks/results, and draws
the pages' pictures.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from evidence.claims import figures
from evidence.pictures import PICTURES
from jinja2 import Environment, FileSystemLoader, StrictUndefined

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGES = {
    "findings.md": Path("docs/findings.md"),
    **{
        name: Path("docs/evidence") / name
        for name in ("ranking.md", "plans.md", "training.md", "speed.md", "service.md", "unproven.md")
    },
}
"""Template → page."""


def main() -> None:
    """Write the pages and their pictures."""
    for page, text in pages(RESULTS).items():
        (ROOT / page).parent.mkdir(exist_ok=True)
        (ROOT / page).write_text(text, encoding="utf-8")
        print(page)
    for name, draw in PICTURES.items():
        draw(partial(read, RESULTS), ROOT / "docs/evidence" / name)


def pages(results: Path) -> dict[Path, str]:
    """Page → its text, from the results in a folder.

    Raises:
        jinja2.UndefinedError: a template names a figure that there is not.
        KeyError: a result lacks a figure.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "span": span,
        "signed": signed,
        "percent": percent,
        "points": points,
        "median": statistics.median,
        "p99": lambda values: float(np.percentile(values, 99)),
        "uneven": uneven,
    }
    named = {"read": partial(read, results), **figures(partial(read, results))}
    texts = {page: environment.get_template(name).render(named) for name, page in PAGES.items()}
    return {page: text.replace("−0.000", "+0.000") for page, text in texts.items()}


def read(results: Path, name: str) -> Any:
    """Content of a stored result."""
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def span(values: Iterable[float], digits: int = 2) -> str:
    """The smallest and the largest of some values."""
    found = sorted(values)
    low, high = (f"{one:.{digits}f}".replace("-", "−") for one in (found[0], found[-1]))
    return low if low == high else f"{low} to {high}"


def signed(one: Mapping[str, float] | float, digits: int = 2) -> str:
    """A figure with its sign, and with its interval if it has one."""
    if not isinstance(one, Mapping):
        return f"{one:+.{digits}f}".replace("-", "−")
    return f"{signed(one['mean'], digits)} [{signed(one['low'], digits)}, {signed(one['high'], digits)}]"


def points(shares: Iterable[float]) -> str:
    """The smallest and the largest of some shares, in percentage points."""
    return span((100 * share for share in shares), 1)


def uneven(shares: Sequence[float]) -> float:
    """The largest distance of a share from their mean, over the mean."""
    return max(abs(one / statistics.mean(shares) - 1) for one in shares)


def percent(share: float, digits: int = 0) -> str:
    """A share in per cent."""
    return f"{100 * share:.{digits}f} %"


if __name__ == "__main__":
    main()
