"""Findings of a row of trials."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Findings:
    """Number of trials, counters, and violated guarantees; `tell` is called after each trial with what it was."""

    trials: int = 0
    counted: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    tell: Callable[[str], None] = field(default=lambda text: None, repr=False)

    def done(self, text: str) -> None:
        """Count a trial, and tell what it was."""
        self.trials += 1
        self.tell(text)

    def add(self, name: str, count: int = 1) -> None:
        self.counted[name] = self.counted.get(name, 0) + count

    def most(self, name: str, value: int) -> None:
        self.counted[name] = max(self.counted.get(name, value), value)

    def require(self, holds: bool, trial: str, promise: str) -> None:
        """Record a violated guarantee, unless it holds."""
        if not holds:
            self.broken.append(f"{trial}: {promise}")


@dataclass(frozen=True)
class Row:
    """A row of the table: name, guarantee, numbers of trials (full and in tests), and the function that runs them."""

    name: str
    promise: str
    full: int
    short: int
    run: Callable[[int, Findings], None]
