"""Errors of run stores, independent of HTTP; `solrl_rollout.rollout_problems` translates them at the edge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class StoreError(Exception):
    """Root of the stores' errors. Each has its facts as attributes."""

    def __str__(self) -> str:
        return repr(self)


class StoreUrlError(ValueError):
    """The URL of a store cannot be used. Its text never repeats the URL, which may contain a password."""


@dataclass(eq=False)
class StoreUnavailableError(StoreError):
    """The store at `address` does not answer, or refuses a command; `fault` says why."""

    address: str
    fault: str


@dataclass(eq=False)
class StoreFullError(StoreUnavailableError):
    """The store at `address` has no memory left for a write."""


@dataclass(eq=False)
class RunNotFoundError(StoreError):
    """The store has no version of a run."""

    run: str


@dataclass(eq=False)
class VersionNotFoundError(StoreError):
    """A run has no such version; its head is `head`, and `held` are its versions, oldest first."""

    run: str
    version: int
    head: int
    held: Sequence[int]


@dataclass(eq=False)
class VersionConflictError(StoreError):
    """A version was put whose number is taken by other content, or was that of a deleted version."""

    run: str
    version: int
    fault: str
    got: Any
    expected: Any


@dataclass(eq=False)
class ParentConflictError(StoreError):
    """A version was put that was trained from `parent`, while the run's head is `head`; None is no version."""

    run: str
    version: int
    parent: int | None
    head: int | None


@dataclass(eq=False)
class HeadConflictError(StoreError):
    """A run was to be rewound from `given`, while its head is `head`."""

    run: str
    version: int
    given: int
    head: int


@dataclass(eq=False)
class QuotaExceededError(StoreError):
    """A version would take its tenant over the quota of `quota` bytes, to `held`."""

    run: str
    version: int
    held: int
    quota: int


@dataclass(eq=False)
class CorruptError(StoreError):
    """A version is damaged in the store, or the run's own entries are, if `version` is None."""

    run: str
    version: int | None
    got: str
    expected: str


@dataclass(eq=False)
class ReportTooLargeError(StoreError):
    """The report of an iteration has `size` bytes as JSON without samples, more than `limit`."""

    iteration: int
    size: int
    limit: int
