"""Errors of run stores, as problems."""

from collections.abc import Sequence
from typing import Any

from solrl_proto.problems import ProblemError, ProblemKind


class StoreUrlError(ValueError):
    """The URL of a store cannot be used. Its text never repeats the URL, which may contain a password."""


class StoreUnavailableError(ProblemError):
    """The store at `address` does not answer, refuses a command, or, if it is `full`, has no memory left for a write.

    Attributes:
        address: the store's address.
        fault: the store's answer.
    """

    def __init__(self, address: str, fault: str, *, full: bool = False) -> None:
        self.address, self.fault = address, fault
        super().__init__(
            ProblemKind.STORE_UNAVAILABLE,
            f"Redis at {address}{' is full' if full else ''}: {fault}",
            got=None if full else address,
            expected="a Redis with memory free" if full else "a Redis that answers",
            action="delete runs, lower --retain of the service, or raise Redis' maxmemory (SOLRL_REDIS_MEMORY)"
            if full
            else "check that Redis runs, is reachable from here, and accepts writes; then try again",
        )


class RunNotFoundError(ProblemError):
    """The store has no version of a run."""

    def __init__(self, run: str) -> None:
        super().__init__(
            ProblemKind.RUN_NOT_FOUND,
            f"run {run!r} has no adapter in this store",
            where="run",
            got=run,
            action="push the run's first adapter, or correct the name",
        )


class CorruptError(ProblemError):
    """A version is damaged in the store, or the run's own entries are, if `version` is None."""

    def __init__(self, run: str, version: int | None, got: str, expected: str) -> None:
        of_run = "delete the run and push it again; check who else writes to the store, and its host"
        of_version = "push a new version; check the store's memory policy and its host"
        super().__init__(
            ProblemKind.ADAPTER_CORRUPT,
            f"{'' if version is None else f'version {version} of '}run {run!r} is damaged in the store",
            got=got,
            expected=expected,
            action=of_run if version is None else of_version,
        )


def not_found(run: str, version: int, head: int | None, versions: Sequence[int]) -> ProblemError:
    """The error for a run (if it has no head) or one of its versions; `versions` are its versions, oldest first."""
    if head is None:
        return RunNotFoundError(run)
    return ProblemError(
        ProblemKind.VERSION_NOT_FOUND,
        f"run {run!r} has no version {version} in this store; its head is {head}, its versions are {list(versions)}",
        where="version",
        got=version,
        expected=list(versions),
        action="use a stored version; old ones are deleted",
    )


def version_conflict(run: str, version: int, fault: str, got: Any, expected: Any) -> ProblemError:
    """The error for a put under the number of a version with other content, or of a deleted version."""
    return ProblemError(
        ProblemKind.VERSION_CONFLICT,
        f"version {version} of run {run!r}: {fault}",
        where="version",
        got=got,
        expected=expected,
        action="versions never change: push the next one, or use another run name",
    )


def head_conflict(run: str, version: int, expected_head: int, head: int) -> ProblemError:
    """A run was to be rewound from `expected_head`, while its head is `head`."""
    return ProblemError(
        ProblemKind.HEAD_CONFLICT,
        f"run {run!r} cannot be rewound from version {expected_head} to version {version}: its head is version {head}",
        where="head",
        got=expected_head,
        expected=head,
        action="two trainers may be writing to one run; list its versions, and rewind from its head",
    )


def quota_exceeded(run: str, version: int, size: int, quota: int) -> ProblemError:
    """A version would take its tenant over the quota of `quota` bytes, to `size`."""
    return ProblemError(
        ProblemKind.ADAPTER_QUOTA,
        f"version {version} of run {run!r} would take the tenant's adapters over their quota",
        where="body",
        got=f"{size} bytes with this one",
        expected=f"at most {quota} bytes",
        action="delete a finished run, or raise tenant_adapter_bytes of the service",
    )
