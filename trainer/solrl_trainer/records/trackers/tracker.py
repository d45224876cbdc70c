"""The base of all trackers, and what one is told about its run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker needs it.

    Attributes:
        key: 16 hexadecimal digits, kept when the run is resumed, new when it goes back to a version.
        version: from where the run continues; later versions are sent again. −1 for a new run.
        settings: JSON values.
    """

    name: str
    key: str
    version: int
    folder: Path
    settings: Mapping[str, Any]


class Tracker(ABC):
    """A run in an experiment tracker; the constructor opens it with the run's settings.

    Of a resumed run, only what is new follows.

    Any method may raise: the run notes the failure, continues, and calls the tracker no more. `package` is the one that
    the tracker imports; None if none can be missing.
    """

    package: ClassVar[str | None] = None

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def figures(self, version: int, figures: Mapping[str, float]) -> None:
        """Figures of a version: `event/key` → value, named as in metrics.jsonl."""

    @abstractmethod
    def images(self, version: int, sheet: Image.Image, caption: str) -> None:
        """Images of the first held-out prompts under a version, always with the same seeds."""

    @abstractmethod
    def report(self, page: Path) -> None:
        """The report of the finished run, one HTML file."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """End the run at the tracker; called once. `failed`: the run ended by an error."""
