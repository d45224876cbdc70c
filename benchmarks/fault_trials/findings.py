"""What a row of trials comes to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Tell = Callable[[str], None]
"""Told after each trial how it ended, in a few words."""


@dataclass
class Findings:
    """Trials so far, what they counted, and each one that broke a promise."""

    trials: int = 0
    counted: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def add(self, name: str, count: int = 1) -> None:
        """Count towards `name`."""
        self.counted[name] = self.counted.get(name, 0) + count

    def most(self, name: str, value: int) -> None:
        """Keep the largest value of `name`."""
        self.counted[name] = max(self.counted.get(name, value), value)

    def require(self, holds: bool, trial: str, promise: str) -> None:
        """Note a broken promise."""
        if not holds:
            self.broken.append(f"{trial}: {promise}")

    @property
    def passed(self) -> bool:
        """Whether every promise held, in at least one trial."""
        return self.trials > 0 and not self.broken

    @property
    def found(self) -> str:
        """What was counted, as words."""
        return "; ".join(f"{name}: {value}" for name, value in self.counted.items())


@dataclass(frozen=True)
class Row:
    """A row of the table: its name, what must hold, how many trials it takes in full and in CI, and how to
    run them: findings are added as they come."""

    name: str
    promise: str
    full: int
    short: int
    run: Callable[[int, Tell, Findings], None]
