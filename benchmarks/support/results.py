"""Results of a benchmark: a JSON file, and the page that is rendered from it."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from support.own_process import Row, rows_of

Found = TypeVar("Found")
Page = Callable[[Any], str]
"""Markdown page of the content of the JSON file."""


class Results:
    """OUT/NAME.json and OUT/NAME.md of a benchmark. Figures of earlier calls stay until replaced.

    Attributes:
        found: content of the JSON file; its field `rows` has what `add` is given.
    """

    def __init__(self, name: str, out: Path, page: Page) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = out / f"{name}.json"
        self._page = page
        self.found: Any = json.loads(self._file.read_text()) if self._file.is_file() else {}

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.found.setdefault("rows", [])
        return rows

    def add(self, row: Row, *same: str) -> None:
        """Write a row, instead of any that has the same values of these fields; tells it on stderr."""
        self.keep(lambda known: not same or any(known[name] != row[name] for name in same))
        self.rows.append(row)
        self.write()
        print(str(row)[:300], file=sys.stderr, flush=True)

    def keep(self, wanted: Callable[[Row], bool]) -> None:
        self.found["rows"] = [row for row in self.rows if wanted(row)]

    def write(self) -> None:
        self._file.write_text(json.dumps(self.found, indent=1) + "\n")

    def show(self) -> None:
        text = self._page(self.found)
        self._file.with_suffix(".md").write_text(text)
        print(text, flush=True)


def options(description: str | None, device: str | None = None) -> argparse.ArgumentParser:
    """The options of every benchmark. With a default for `--device`, those of one that runs on a GPU."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--render", action="store_true", help="measure nothing: the page from the JSON alone")
    if device is not None:
        parser.add_argument("--device", default=device, help="on a cpu, the miniatures try the benchmark out")
    return parser


def measure_models(
    name: str,
    description: str | None,
    models: Sequence[str],
    measure: Callable[[str, argparse.Namespace], Iterator[Row]],
    page: Page,
    *same: str,
    further: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> None:
    """The command line of a benchmark that measures models, each in its own process; writes and prints the page.

    Args:
        name: of the files of results.
        description: of the benchmark, for `--help`.
        models: those that it knows.
        measure: yields a model's rows.
        page: of all rows.
        same: fields that tell rows apart. Without them, all of a model's rows come from one call.
        further: adds options.
    """
    parser = options(description, device="cuda")
    parser.add_argument("--models", nargs="+", default=list(models), choices=list(models))
    further(parser)
    args = parser.parse_args()
    results = Results(name, args.out, page)
    for model in () if args.render else args.models:
        if not same:
            results.keep(lambda row, model=model: row["model"] != model)  # type: ignore[misc]
        for row in rows_of(measure, model, args, device=args.device):
            results.add(row, *same)
    results.show()


def in_turns(works: Mapping[str, Callable[[int], Found]], rounds: int) -> dict[str, list[Found]]:
    """What works return, by name, in rounds that take them in turns, so that all run at the same clocks.

    One more round, −1, runs first and is discarded: code is compiled then, and matrix libraries choose their kernels.
    """
    found: dict[str, list[Found]] = {name: [] for name in works}
    for turn in range(-1, rounds):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            result = works[name](turn)
            if turn >= 0:
                found[name].append(result)
    return found


def timed(work: Callable[[], Found]) -> tuple[float, Found]:
    """Seconds of a call on a GPU that is idle before, and its result."""
    began = _idle()
    made = work()
    return _idle() - began, made


def _idle() -> float:
    """The time, once the GPU has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def command(name: str, parser: argparse.ArgumentParser, settings: Mapping[str, Any]) -> str:
    """Command line of a benchmark that gives these settings."""
    words = ["python", f"benchmarks/{name}.py"]
    for key, default in vars(parser.parse_args([])).items():
        value = settings.get(key, default)
        if key != "out" and value != default:
            words += [f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def device_name(device: str) -> str:
    """The device, as pages name it."""
    return "CPU, the miniatures" if device == "cpu" else torch.cuda.get_device_name(device)


def shown_size(size: int | str) -> str:
    """Size of a model's samples, as pages name it: "512²", or of clips "832×480×33"."""
    return f"{size}²" if isinstance(size, int) else size


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(map(str, row))} |" for row in rows)]
