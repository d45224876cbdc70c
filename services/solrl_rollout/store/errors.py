"""Errors of run stores. Each says what is wrong, at what, and the remedy; HTTP's statuses are the edge's."""

from collections.abc import Sequence
from typing import Any

from solrl_core.errors import SolrlError


class StoreError(SolrlError):
    """Root of the stores' errors; `kind` is the name of its `ProblemKind`."""

    kind = ""


class StoreUrlError(ValueError):
    """The URL of a store cannot be used. Its text never repeats the URL, which may contain a password."""


class StoreUnavailableError(StoreError):
    """The store at `address` does not answer, or refuses a command; `fault` says why."""

    kind = "STORE_UNAVAILABLE"

    def __init__(self, address: str, fault: str) -> None:
        super().__init__(
            f"Redis at {address}: {fault}",
            got=address,
            expected="a Redis that answers and has memory free",
            action="check that Redis runs, is reachable from here, and accepts writes; then try again",
        )


class RunNotFoundError(StoreError):
    """The store has no version of a run."""

    kind = "RUN_NOT_FOUND"

    def __init__(self, run: str) -> None:
        super().__init__(
            f"run {run!r} has no adapter in this store",
            where="run",
            got=run,
            action="push the run's first adapter, or correct the name",
        )


class VersionNotFoundError(StoreError):
    """A run has no such version; its head is `head`, and `held` are its versions, oldest first."""

    kind = "VERSION_NOT_FOUND"

    def __init__(self, run: str, version: int, head: int, held: Sequence[int]) -> None:
        super().__init__(
            f"run {run!r} has no version {version} in this store; its head is {head}, its versions are {list(held)}",
            where="version",
            got=version,
            expected=list(held),
            action="use a stored version; old ones are deleted",
        )


class VersionConflictError(StoreError):
    """A version was put whose number is taken by other content, or was that of a deleted version."""

    kind = "VERSION_CONFLICT"

    def __init__(self, run: str, version: int, fault: str, got: Any, expected: Any) -> None:
        super().__init__(
            f"version {version} of run {run!r}: {fault}",
            where="version",
            got=got,
            expected=expected,
            action="versions never change: push the next one, or use another run name",
        )


class ParentConflictError(StoreError):
    """A version was put that was trained from `parent`, while the run's head is `head`; None is no version."""

    kind = "PARENT_CONFLICT"

    def __init__(self, run: str, version: int, parent: int | None, head: int | None) -> None:
        def named(one: int | None) -> str:
            return "none" if one is None else f"version {one}"

        super().__init__(
            f"version {version} of run {run!r} was trained from {named(parent)}; the run's head is {named(head)}",
            where="parent",
            got=parent,
            expected=head,
            action="two trainers may be writing to one run: give each its own, or resume from the head",
        )


class HeadConflictError(StoreError):
    """A run was to be rewound from `given`, while its head is `head`."""

    kind = "HEAD_CONFLICT"

    def __init__(self, run: str, version: int, given: int, head: int) -> None:
        super().__init__(
            f"run {run!r} cannot be rewound from version {given} to version {version}: its head is version {head}",
            where="head",
            got=given,
            expected=head,
            action="two trainers may be writing to one run; list its versions, and rewind from its head",
        )


class QuotaExceededError(StoreError):
    """A version would take its tenant over the quota of `quota` bytes, to `held`."""

    kind = "ADAPTER_QUOTA"

    def __init__(self, run: str, version: int, held: int, quota: int) -> None:
        super().__init__(
            f"version {version} of run {run!r} would take the tenant's adapters over their quota",
            where="body",
            got=f"{held} bytes with this one",
            expected=f"at most {quota} bytes",
            action="delete a finished run, unpin versions, or raise tenant_adapter_bytes of the service",
        )


class CorruptError(StoreError):
    """A version is damaged in the store, or the run's own entries are, if `version` is None."""

    kind = "ADAPTER_CORRUPT"

    def __init__(self, run: str, version: int | None, got: str, expected: str) -> None:
        self.damaged = f"run {run!r}" if version is None else f"version {version} of run {run!r}"
        action = (
            "delete the run and push it again; check who else writes to the store, and its host"
            if version is None
            else "push a new version; check the store's memory policy and its host"
        )
        super().__init__(f"{self.damaged} is damaged in the store", got=got, expected=expected, action=action)


class ReportTooLargeError(StoreError):
    """The report of an iteration has `size` bytes as JSON without samples, more than `limit`."""

    kind = "REPORT_TOO_LARGE"

    def __init__(self, iteration: int, size: int, limit: int) -> None:
        super().__init__(
            f"iteration {iteration} has too many or too long names of rewards, phases and settings",
            where="body",
            got=f"{size} bytes as JSON, without samples",
            expected=f"at most {limit} bytes",
            action="report fewer rewards, phases and settings, or shorter ones",
        )
