"""Benchmarks whose rows each have a target, and the command line, results file and page that they share."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.results import Results, options, table


@dataclass(frozen=True)
class Row:
    """A row of the table: target, result, whether the target was met, and all figures."""

    name: str
    wanted: str
    found: str
    met: bool
    figures: dict[str, Any] = field(default_factory=dict)


Rows = Mapping[str, Callable[[bool], Row]]
"""Name of a row → what measures it, at short counts or not."""


def measure(name: str, rows: Rows, description: str | None, head: Sequence[str]) -> int:
    """Measure the rows that the command line asks for; others keep their last result.

    Args:
        name: of the files of results.
        rows: all rows.
        description: of the benchmark, for `--help`.
        head: lines of the page above the table.

    Returns:
        Exit status: 1 if a target was not met.
    """

    def page(found: Mapping[str, Any]) -> str:
        known = [found[row] for row in rows if row in found]
        cells = ((r["name"], r["wanted"], r["found"], "yes" if r["met"] else "no", r["cores"]) for r in known)
        return "\n".join([*head, "", *table(("test", "target", "result", "met", "cores"), cells)]) + "\n"

    parser = options(description)
    parser.add_argument("--only", nargs="+", choices=rows, default=list(rows), help="leave the other rows")
    parser.add_argument("--short", action="store_true", help="small counts, by default into runs/short")
    args = parser.parse_args()
    shown = args.short and args.out == parser.get_default("out")
    results = Results(name, Path("runs/short") if shown else args.out, page)
    for row in () if args.render else args.only:
        start = time.perf_counter()
        measured = asdict(rows[row](args.short))
        where = {"cores": len(os.sched_getaffinity(0)), "date": time.strftime("%Y-%m-%d")}
        results.found[row] = measured | {"seconds": time.perf_counter() - start} | where
        results.write()
        print(f"{row}: {measured['found']}", file=sys.stderr, flush=True)
    results.show()
    return 0 if args.render or all(results.found[row]["met"] for row in args.only) else 1
