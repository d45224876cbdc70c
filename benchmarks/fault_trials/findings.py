"""Findings of a row of trials."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Tell = Callable[[str], None]
"""Called after each trial with a short description of it."""


@dataclass
class Findings:
    """Number of trials, counters, and violated guarantees; `tell` follows the trials."""

    trials: int = 0
    counted: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    tell: Tell = field(default=lambda text: None, repr=False)

    def done(self, text: str) -> None:
        """Count a trial, and tell what it was."""
        self.trials += 1
        self.tell(text)

    def add(self, name: str, count: int = 1) -> None:
        """Increase a counter."""
        self.counted[name] = self.counted.get(name, 0) + count

    def most(self, name: str, value: int) -> None:
        """Record the largest value."""
        self.counted[name] = max(self.counted.get(name, value), value)

    def require(self, holds: bool, trial: str, promise: str) -> None:
        """Record a violated guarantee, unless it holds."""
        if not holds:
            self.broken.append(f"{trial}: {promise}")

    @property
    def passed(self) -> bool:
        """Whether there were trials and no guarantee was violated."""
        return self.trials > 0 and not self.broken

    @property
    def found(self) -> str:
        """Counters as text."""
        return "; ".join(f"{name}: {value}" for name, value in self.counted.items())


@dataclass(frozen=True)
class Row:
    """A row of the table: name, guarantee, numbers of trials (full and in tests), and the function that runs them."""

    name: str
    promise: str
    full: int
    short: int
    run: Callable[[int, Findings], None]
