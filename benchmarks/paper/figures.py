"""Cells, rows and pages. A table is a function of finished runs; what is missing is said in its cell."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from support.results import table

from paper.intervals import Estimate

NOT_RUN = "not run"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A cell.

    Attributes:
        value: its figure; None if there is none.
        spec: format of the figure and of its limits.
        notes: what is said behind the figure, or in its place.
        bold: whether it stands out.
    """

    value: Estimate | float | None
    spec: str = "+.3f"
    notes: tuple[str, ...] = ()
    bold: bool = False

    def __str__(self) -> str:
        own = [] if self.value is None else [f"{self.value:{self.spec}}"]
        said = ", ".join((*own, *self.notes)) or NOT_RUN
        return f"**{said}**" if self.bold else said

    def over(self, cost: float | None) -> "Figure":
        """A ratio of iterations as one of compute, where an iteration costs so many of the other's; None: not known."""
        if cost is None:
            return Figure(None, notes=("not timed",))
        known = isinstance(self.value, Estimate)
        return Figure(self.value.scaled(1 / cost) if known else None, self.spec, self.notes)


@dataclass(frozen=True)
class Table:
    """Rows of cells: Markdown as text, and figures in JSON.

    Attributes:
        keys: heads of the first columns.
        rows: cell of the first column, or cells of the first ones → head → cell. All rows have the same heads. A cell
            of several figures is a tuple.
    """

    keys: Sequence[str]
    rows: Mapping[Any, Row]

    def __str__(self) -> str:
        if not self.rows:
            return f"{NOT_RUN.capitalize()}."
        heads = next(iter(self.rows.values()))
        cells = (
            [*_tuple(key), *(", ".join(map(str, _tuple(cell))) for cell in row.values())]
            for key, row in self.rows.items()
        )
        return "\n".join(table([*self.keys, *heads], cells))


def _tuple(cell: Any) -> tuple[Any, ...]:
    return cell if isinstance(cell, tuple) else (cell,)


def as_json(one: Any) -> Any:
    """Tables, figures and estimates for `json.dumps`. Infinite limits are null."""
    if isinstance(one, Table):
        return {", ".join(_tuple(key)): row for key, row in one.rows.items()}
    if isinstance(one, Figure):
        return one.value
    assert isinstance(one, Estimate), one
    return {name: value if math.isfinite(value) else None for name, value in asdict(one).items()}


def templates(folder: Path) -> Environment:
    """Markdown pages in a folder, in which a name without a figure is an error."""
    return Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
