"""The interface of run stores, and the rules that all of them share.

A run's versions are immutable, and their numbers increase. Each names as its parent the head that it was trained from.
A run returns to an older version only by deleting all later ones. A store checks a put with `admit` against one
consistent view of the run, and writes only if that view still holds.
"""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from solrl_proto.adapters import AdapterInfo, AdapterList, RunList
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.status import Activity, IterationReport, Point, Samples

DEFAULT_RETAIN = 8
KEPT_POINTS = 10_000
"""Iterations kept per run; beyond that the oldest are deleted."""
KEPT_POINT_BYTES = 8 * 2**20
"""Bytes of a run's iterations as JSON; beyond that the oldest are deleted."""
MAX_POINT_BYTES = 16384
"""Largest iteration, as JSON without samples. One with four rewards has 1.5 kB, and a run's first, with its settings,
6 kB."""
KEPT_ACTIVITY_S = 60
"""Seconds after which progress within an iteration is forgotten."""


@dataclass(frozen=True)
class Progress:
    """A run's last reported iteration and its revision: microseconds since 1970 by the store's clock, increasing."""

    revision: int
    last: Point


class RunStore(ABC):
    """Adapter versions, curves and samples of all runs. Any method may raise ProblemError 503 `store-unavailable`."""

    def __init__(self, retain: int = DEFAULT_RETAIN, quota: int | None = None) -> None:
        """Retain the newest `retain` (≥ 1) unpinned versions per run, and allow `quota` bytes of versions per tenant.

        `put` deletes older unpinned versions.
        """
        if retain < 1:
            raise ValueError(f"retain is {retain}; a store must keep at least 1 version of a run")
        self.retain = retain
        self.quota = quota

    @abstractmethod
    async def put(self, tenant: str, info: AdapterInfo, body: bytes) -> tuple[AdapterInfo, bool]:
        """Store a version and make it the run's head, atomically; return the stored version, and whether it is new.

        The caller has verified that `body` matches `info`. Putting a stored version again with the same digest and
        model succeeds, whatever its parent. Raises 409 `version-conflict` or `parent-conflict`, 413 `adapter-quota`.
        """

    @abstractmethod
    async def get(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        """Return a version and its bytes, digest verified.

        Raises 404 `run-not-found` or `version-not-found`, 500 `adapter-corrupt`.
        """

    @abstractmethod
    async def info(self, tenant: str, run: str, version: int) -> AdapterInfo:
        """Return the description of a version. Raises 404 as `get` does."""

    @abstractmethod
    async def head(self, tenant: str, run: str) -> int | None:
        """Return the run's newest version; None if there is no such run."""

    @abstractmethod
    async def list(self, tenant: str, run: str) -> AdapterList:
        """Return the run's head, pins and all its versions, oldest first. Raises 404 `run-not-found`."""

    @abstractmethod
    async def runs(self, tenant: str) -> RunList:
        """Return all runs of a tenant, by name."""

    async def quota_left(self, tenant: str, run: str, version: int) -> int | None:
        """Return the most bytes that a version may have within its tenant's quota.

        None if any size is allowed: there is no quota, or the version is stored already.
        """
        if self.quota is None:
            return None
        runs = await self.runs(tenant)
        held = runs.size
        for one in runs.runs:
            if one.run == run:
                sizes = {info.version: info.size for info in one.versions}
                if version in sizes:
                    return None
                held -= sum(sizes.get(old, 0) for old in evicted([*sizes, version], one.pinned, self.retain))
        return max(0, self.quota - held)

    @abstractmethod
    async def pin(self, tenant: str, run: str, version: int, pinned: bool) -> None:
        """Protect a version from deletion by newer ones, or stop protecting it. Raises 404 as `get` does."""

    @abstractmethod
    async def rewind(self, tenant: str, run: str, version: int, head: int) -> None:
        """Make a stored version the run's head again, atomically; later ones are deleted, pinned or not.

        If it is the head already, this succeeds. Raises 404 as `get` does, 409 `head-conflict` if neither it nor
        `head` is the head.
        """

    @abstractmethod
    async def delete(self, tenant: str, run: str) -> None:
        """Delete a run with all its versions and iterations. Raises 404 `run-not-found`."""

    @abstractmethod
    async def add_iteration(self, tenant: str, run: str, report: IterationReport) -> int:
        """Store an iteration's report, replacing this and all later iterations; return the run's new revision.

        The newest samples are stored, too. Raises 404 `run-not-found`, 422 `report-too-large`.
        """

    @abstractmethod
    async def iterations(self, tenant: str, run: str) -> tuple[Point, ...]:
        """Return the stored iterations, oldest first. Raises 404 `run-not-found`."""

    @abstractmethod
    async def samples(self, tenant: str, run: str) -> Samples | None:
        """Return the newest samples; None if there are none, or the run does not exist."""

    @abstractmethod
    async def progress(self, tenant: str, runs: Sequence[str]) -> dict[str, Progress]:
        """Return the progress of the given runs, except those that have reported nothing, from one consistent view."""

    @abstractmethod
    async def set_activity(self, tenant: str, run: str, activity: Activity) -> None:
        """Store progress within an iteration, for `KEPT_ACTIVITY_S`. Raises 404 `run-not-found`."""

    @abstractmethod
    async def activities(self, tenant: str, runs: Sequence[str]) -> dict[str, Activity]:
        """Return the progress within an iteration of the given runs, except those without."""

    @abstractmethod
    async def ping(self) -> None:
        """Return if the store answers."""

    async def warnings(self) -> tuple[str, ...]:
        """Settings of the store that risk losing adapters, each with a remedy."""
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Close connections."""


def evicted(versions: Iterable[int], pinned: Container[int], retain: int) -> Sequence[int]:
    """The versions to delete: the oldest unpinned ones beyond `retain`."""
    return sorted(version for version in versions if version not in pinned)[:-retain]


def encode_point(report: IterationReport) -> str:
    """The report as JSON without its samples.

    Raises:
        ProblemError: 422 `report-too-large`.
    """
    text = report.model_dump_json(exclude={"samples"}, exclude_none=True)
    if (size := len(text.encode())) > MAX_POINT_BYTES:
        raise ProblemError(
            ProblemKind.REPORT_TOO_LARGE,
            f"iteration {report.iteration} has too many or too long names of rewards, phases and settings",
            where="body",
            got=f"{size} bytes as JSON, without samples",
            expected=f"at most {MAX_POINT_BYTES} bytes",
            action="report fewer rewards, phases and settings, or shorter ones",
        )
    return text


def over_quota(run: str, version: int, got: str, quota: int) -> ProblemError:
    """The 413 problem for a version that takes its tenant over the quota."""
    return ProblemError(
        ProblemKind.ADAPTER_QUOTA,
        f"version {version} of run {run!r} would take the tenant's adapters over their quota",
        where="body",
        got=got,
        expected=f"at most {quota} bytes",
        action="delete a finished run, unpin versions, or raise tenant_adapter_bytes of the service",
    )


def admit(info: AdapterInfo, head: int | None, stored: AdapterInfo | None) -> AdapterInfo | None:
    """Check a put against the run's head and the version stored under its number.

    Returns:
        `stored` if the put repeats it; None if the version may be written as long as `head` is the head.

    Raises:
        ProblemError: 409 `version-conflict` or `parent-conflict`.
    """
    if stored is not None:
        given, kept = _identity(info), _identity(stored)
        if given == kept:
            return stored
        raise _conflict(info, "this version is stored already, with different content", got=given, expected=kept)
    if head is not None and info.version <= head:
        raise _conflict(
            info,
            f"the run's head is version {head} and version {info.version} is not stored",
            got=info.version,
            expected=f"a version above {head}",
        )
    if info.parent != head:
        raise ProblemError(
            ProblemKind.PARENT_CONFLICT,
            f"version {info.version} of run {info.run!r} was trained from {_named(info.parent)}; "
            f"the run's head is {_named(head)}",
            where="parent",
            got=info.parent,
            expected=head,
            action="two trainers may be writing to one run: give each its own, or resume from the head",
        )
    return None


def head_conflict(run: str, version: int, given: int, head: int) -> ProblemError:
    """The 409 problem for a rewind of a run that has another head."""
    return ProblemError(
        ProblemKind.HEAD_CONFLICT,
        f"run {run!r} cannot be rewound from version {given} to version {version}: its head is version {head}",
        where="head",
        got=given,
        expected=head,
        action="two trainers may be writing to one run; list its versions, and rewind from its head",
    )


async def verify_stored(info: AdapterInfo, body: bytes) -> None:
    """Refuse stored bytes that do not match their digest, with 500 `adapter-corrupt`."""
    digest = await _digest(body)
    if digest != info.digest:
        raise corrupt(info.run, info.version, got=digest, expected=info.digest)


def corrupt(run: str, version: int, *, got: str, expected: str) -> ProblemError:
    """The 500 problem for a version that is damaged in the store."""
    return ProblemError(
        ProblemKind.ADAPTER_CORRUPT,
        f"version {version} of run {run!r} is damaged in the store",
        got=got,
        expected=expected,
        action="push a new version; check the store's memory policy and its host",
    )


def corrupt_run(run: str, *, got: str, expected: str) -> ProblemError:
    """The 500 problem for a run whose own entries are damaged in the store."""
    return ProblemError(
        ProblemKind.ADAPTER_CORRUPT,
        f"run {run!r} is damaged in the store",
        got=got,
        expected=expected,
        action="delete the run and push it again; check who else writes to the store, and its host",
    )


def not_found(run: str, version: int, head: int | None, versions: Iterable[int]) -> ProblemError:
    """The 404 problem for a run (if it has no head) or one of its versions."""
    if head is None:
        return ProblemError(
            ProblemKind.RUN_NOT_FOUND,
            f"run {run!r} has no adapter in this store",
            where="run",
            got=run,
            action="push the run's first adapter, or correct the name",
        )
    held = sorted(versions)
    return ProblemError(
        ProblemKind.VERSION_NOT_FOUND,
        f"run {run!r} has no version {version} in this store; its head is {head}, its versions are {held}",
        where="version",
        got=version,
        expected=held,
        action="use a stored version; old ones are deleted",
    )


async def _digest(body: bytes) -> str:
    # In a thread: a FLUX.1 adapter takes more than a tenth of a second, too long for the event loop.
    return f"sha256:{(await asyncio.to_thread(hashlib.sha256, body)).hexdigest()}"


def _identity(info: AdapterInfo) -> dict[str, str]:
    return {"digest": info.digest, "model": info.model}


def _named(version: int | None) -> str:
    return "none" if version is None else f"version {version}"


def _conflict(info: AdapterInfo, fault: str, *, got: object, expected: object) -> ProblemError:
    return ProblemError(
        ProblemKind.VERSION_CONFLICT,
        f"version {info.version} of run {info.run!r}: {fault}",
        where="version",
        got=got,
        expected=expected,
        action="versions never change: push the next one, or use another run name",
    )
