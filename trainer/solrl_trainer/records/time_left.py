"""Progress of work whose amount is known: the share that is done, and when it will end."""

import sys
import time
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from solrl_trainer.run_folder.figures import duration_text

LINE_EVERY = 30.0
"""Least seconds between two plain lines about the same work."""


class TimeLeft:
    """Estimate of the end of some work, by its mean pace since this was made."""

    def __init__(self) -> None:
        self._began = self._line = time.monotonic()

    def text(self, done: float, total: float, *, brief: bool = False) -> str:
        """Such as "25 %, ends at 14:05:30, 1 min 30 s left"; the seconds left are dropped where it must be brief.

        Nothing is estimated before something is done.
        """
        share = f"{done / total:.0%}".replace("%", " %")
        if not done:
            return share
        seconds = (time.monotonic() - self._began) * (total - done) / done
        ends = datetime.now() + timedelta(seconds=seconds)
        text = f"{share}, ends at {ends:%H:%M:%S}"
        return text if brief else f"{text}, {duration_text(round(seconds))} left"

    def line_is_due(self) -> bool:
        """Whether the last plain line, or the beginning, is `LINE_EVERY` seconds ago; a line that is due counts."""
        due = time.monotonic() - self._line >= LINE_EVERY
        if due:
            self._line = time.monotonic()
        return due


class LiveLine:
    """Output of a command on stderr: a live line in a terminal, which disappears at the end, and lines of text.

    A `quiet` one shows nothing, as on ranks other than the first.
    """

    def __init__(self, *columns: ProgressColumn, file: TextIO | None = None, quiet: bool = False) -> None:
        self._console = Console(file=file or sys.stderr, highlight=False, markup=False, quiet=quiet)
        self._is_live = self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not self._is_live)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, soft_wrap=True)


class Countdown(LiveLine):
    """Progress of some work, by its name; outside a terminal, a line now and then. It is an `OnProgress`."""

    def __init__(self, work: str, file: TextIO | None = None, *, quiet: bool = False) -> None:
        columns = (SpinnerColumn(), TextColumn(work), BarColumn(bar_width=16), TimeElapsedColumn())
        super().__init__(*columns, TextColumn("{task.fields[left]}"), file=file, quiet=quiet)
        self._work = work
        self._task = self._progress.add_task(work, total=None, left="")
        self._left: TimeLeft | None = None

    def __call__(self, done: float, total: float) -> None:
        """Show how much is done. The first call, with nothing done, begins the estimate."""
        self._left = self._left or TimeLeft()
        text = self._left.text(done, total)
        self._progress.update(self._task, completed=done, total=total, left=text, refresh=True)
        if not self._is_live and self._left.line_is_due():
            self.print(f"{self._work}: {text}")
