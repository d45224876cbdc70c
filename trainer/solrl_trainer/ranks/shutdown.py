"""Early shutdown of all ranks, and its reason."""

from dataclasses import dataclass
from typing import Literal

_EXIT_CODES = {"failed": 2, "died": 2, "interrupted": 130, "terminated": 143}


class ShutdownError(BaseException):
    """Raised in a rank's main thread when all ranks shut down; `except Exception` does not catch it."""


@dataclass(frozen=True)
class Shutdown:
    """Reason why all ranks shut down early.

    Attributes:
        rank: rank that caused the shutdown.
        kind: the rank raised an error, died without a message, was interrupted by Ctrl-C, or terminated by a signal.
        text: text of the error.
    """

    rank: int
    kind: Literal["failed", "died", "interrupted", "terminated"]
    text: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code of every rank."""
        return _EXIT_CODES[self.kind]

    def __str__(self) -> str:
        """Message for the user."""
        if self.kind == "failed":
            return self.text if self.rank == 0 else f"rank {self.rank}: {self.text}"
        if self.kind == "died":
            return f"rank {self.rank} died (killed, out of memory, or its machine is gone), so all ranks stop"
        by = "Ctrl-C" if self.kind == "interrupted" else "a signal"
        return f"stopped by {by} on rank {self.rank}"
