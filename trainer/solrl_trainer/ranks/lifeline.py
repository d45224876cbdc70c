"""Lifeline of the ranks: a barrier without a time limit, and the news of a rank's end with its reason."""

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from solrl_trainer.ranks.lines import Lines, send
from solrl_trainer.ranks.place import Place
from solrl_trainer.text import printable

_GRACE = 10.0
"""Seconds in which a rank must exit after it is told to; it may be stuck in a collective that never ends."""
_ANSWER = 5.0
"""Seconds in which the news of an end must arrive."""
_CODES = {"failed": 2, "lost": 2, "interrupted": 130, "terminated": 143}


class ToldToEndError(BaseException):
    """Raised in a process's main thread when all ranks must end; `except Exception` does not catch it."""


@dataclass(frozen=True)
class End:
    """The early end of a run.

    Attributes:
        rank: the rank that caused it.
        kind: the rank raised an error, died without a message, was interrupted by Ctrl-C, or terminated by a signal.
        text: the error.
    """

    rank: int
    kind: Literal["failed", "lost", "interrupted", "terminated"]
    text: str = ""

    @property
    def code(self) -> int:
        """Exit code of every rank."""
        return _CODES[self.kind]

    def __str__(self) -> str:
        """Message for the user."""
        if self.kind == "failed":
            return self.text if self.rank == 0 else f"rank {self.rank}: {self.text}"
        if self.kind == "lost":
            return f"rank {self.rank} died (killed, out of memory, or its machine is gone), so all ranks stop"
        by = "Ctrl-C" if self.kind == "interrupted" else "a signal"
        return f"stopped by {by} on rank {self.rank}"


class Lifeline:
    """Connections to the other ranks, for short messages.

    `meet` waits for all ranks as long as all are alive, so that the time limit of a collective excludes a rank's work.

    Attributes:
        end: reason why all ranks must end; None while the run continues.
        advice: text that is appended to the message about an end.
    """

    def __init__(self, place: Place, lines: Lines) -> None:
        """Take over the connections; the calling thread is the one that is told to end."""
        self.end: End | None = None
        self.advice = ""
        self._place = place
        self._lines = lines
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._arrived: Counter[int] = Counter()
        self._own = self._begun = 0
        self._over = self._ending = self._leaving = self._spoken = False
        self._main = threading.get_ident()

    def listen(self) -> None:
        """Listen to the connections. The handler of SIGTERM must be in place."""
        for rank in self._lines:
            threading.Thread(target=self._listen, args=(rank,), name=f"solrl-rank-{rank}", daemon=True).start()

    def meet(self, *, last: bool = False) -> None:
        """Wait until every rank has called this as often as this one; after the `last` call ranks may exit.

        Raises:
            ToldToEndError: all must end.
        """
        self._own += 1
        self._say({"arrived": self._own, "last": last})
        with self._changed:
            self._changed.wait_for(lambda: self._begun >= self._own or self.end is not None)
            if self._begun < self._own:
                self._leaving = True
                raise ToldToEndError

    def on_signal(self, *_: object) -> None:
        """Handle SIGTERM, with which torchrun and `Lifeline` tell a process to end.

        Raises:
            ToldToEndError: unless the process is already ending.
        """
        if not self._leaving:
            self._leaving = True
            raise ToldToEndError

    def declare(self, kind: Literal["failed", "interrupted", "terminated"], text: str = "") -> End:
        """End all ranks because of this one, unless they are already ending; returns the first cause."""
        self._leaving = True
        if kind == "terminated":
            self.await_end(1.0)  # torchrun ends all when one dies, perhaps before its connection is found closed
        own = End(self._place.rank, kind, text)
        if self.end is None:
            self._say({"end": asdict(own)})
        return self.await_end() or own

    def await_end(self, seconds: float = _ANSWER) -> End | None:
        """The reason why all ranks must end, if it becomes known in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.end is not None, seconds)
        return self.end

    def tell(self, end: End) -> None:
        """Print once why all ranks end, on one rank per machine."""
        if not self._spoken and self._place.speaks(end.rank if end.kind == "lost" else None):
            self._spoken = True
            text = "\n".join(map(printable, str(end).splitlines()))
            print(f"solrl-train: {text}{self.advice and '; ' + self.advice}", file=sys.stderr, flush=True)

    def _say(self, message: Mapping[str, Any]) -> None:
        """Send a message to rank 0; on rank 0, process it."""
        if self._place.first:
            self._hear(self._place.rank, message)
            return
        try:
            with self._sending:
                send(self._lines[0], dict(message))
        except OSError:
            self._set_end(End(0, "lost"))

    def _listen(self, rank: int) -> None:
        try:
            with self._lines[rank].makefile("rb") as lines:
                for line in lines:
                    self._hear(rank, json.loads(line))
        except (OSError, ValueError):
            pass
        if not self._over:
            self._set_end(End(rank, "lost"))

    def _hear(self, rank: int, message: Mapping[str, Any]) -> None:
        if "end" in message:
            self._set_end(End(**message["end"]))
        elif "begin" in message:
            self._begin(message["begin"], message["last"])
        elif self._arrive(message["arrived"]):
            self._begin(message["arrived"], message["last"])

    def _arrive(self, number: int) -> bool:
        """Count an arrival at a meeting, on rank 0; returns whether it was the last."""
        with self._changed:
            self._arrived[number] += 1
            if self._arrived[number] < self._place.size:
                return False
            del self._arrived[number]
            return True

    def _begin(self, number: int, last: bool) -> None:
        self._over = self._over or last
        self._pass_on({"begin": number, "last": last})
        with self._changed:
            self._begun = number
            self._changed.notify_all()

    def _set_end(self, end: End) -> None:
        with self._changed:
            if self._ending or self._over:
                return
            self._ending = True
        # Before this process learns it and perhaps exits.
        self._pass_on({"end": asdict(end)})
        with self._changed:
            self.end = end
            self._changed.notify_all()
        if not self._leaving:
            signal.pthread_kill(self._main, signal.SIGTERM)
        timer = threading.Timer(_GRACE, self._leave, args=(end,))
        timer.daemon = True
        timer.start()

    def _pass_on(self, message: dict[str, Any]) -> None:
        """Send a message of rank 0 to all others."""
        if self._place.first:
            with self._sending:
                for line in self._lines.values():
                    try:
                        send(line, message)
                    except OSError:  # this rank's listener reports it
                        continue

    def _leave(self, end: End) -> None:
        """Exit the process although its main thread is stuck."""
        self.tell(end)
        leave(end.code)


def leave(code: int) -> None:
    """Exit the process immediately: its clean-up would wait for collectives that may never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
