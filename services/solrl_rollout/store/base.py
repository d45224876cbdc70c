"""What an adapter store promises, and the rules that every store shares.

Versions of a run are immutable and grow; each names the head it was made from as its parent. A run goes back only by
deleting those after the one it goes on from. A store judges a put with `admit` against one consistent view of the run,
and writes only if that view still holds.
"""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from solrl_proto.adapters import AdapterInfo, AdapterList, RunList
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.status import IterationReport, Point, Samples

DEFAULT_RETAIN = 8
KEPT_POINTS = 10_000
"""Iterations that are remembered of a run; beyond it the oldest are forgotten."""
KEPT_POINT_BYTES = 8 * 2**20
"""Bytes of them, as JSON; beyond it the oldest are forgotten, too."""
MAX_POINT_BYTES = 4096
"""Largest iteration, as JSON without samples. Four rewards and eight phases have 0.9 kB."""


@dataclass(frozen=True)
class Progress:
    """The iteration told last, and when: microseconds since 1970 by the store's clock, growing with each."""

    revision: int
    last: Point


class RunStore(ABC):
    """Versioned adapters of all tenants' runs. Any method may raise ProblemError 503 `store-unavailable`."""

    def __init__(self, retain: int = DEFAULT_RETAIN, quota: int | None = None) -> None:
        """Keep the newest `retain` (≥ 1) unpinned versions of a run, and `quota` bytes of a tenant's versions.

        Older unpinned versions are deleted at `put`.
        """
        if retain < 1:
            raise ValueError(f"retain is {retain}; a store must keep at least 1 version of a run")
        self.retain = retain
        self.quota = quota

    @abstractmethod
    async def put(self, tenant: str, info: AdapterInfo, body: bytes) -> tuple[AdapterInfo, bool]:
        """Store a version and make it the run's head, atomically; return what is stored, and whether it is new.

        A version that is stored already with this digest and model is a success, whatever its parent. Raises 409
        `version-conflict` or `parent-conflict`, 413 `adapter-quota`, 422 `digest-mismatch` when `body` is not what
        `info` says.
        """

    @abstractmethod
    async def get(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        """Return a version and its bytes, digest verified.

        Raises 404 `run-not-found` or `version-not-found`, 500 `adapter-corrupt`.
        """

    @abstractmethod
    async def info(self, tenant: str, run: str, version: int) -> AdapterInfo:
        """Return what is stored under a version. Raises 404 as `get` does."""

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
        """Return the bytes that a version may have before its tenant is over the quota.

        None where any size will do: there is no quota, or the version is stored already.
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
        """Keep a version whatever comes after it, or no longer. Raises 404 as `get` does."""

    @abstractmethod
    async def rewind(self, tenant: str, run: str, version: int, head: int) -> None:
        """Make a version that is held the run's head again, atomically: those after it are deleted, pinned or not.

        Where it is the head already, that is a success. Raises 404 as `get` does, 409 `head-conflict` where neither
        it nor `head` is the head.
        """

    @abstractmethod
    async def delete(self, tenant: str, run: str) -> None:
        """Delete a run with all its versions and iterations. Raises 404 `run-not-found`."""

    @abstractmethod
    async def add_iteration(self, tenant: str, run: str, report: IterationReport) -> int:
        """Remember what an iteration came to, in place of it and all after it; return the run's new revision.

        The newest samples are kept besides. Raises 404 `run-not-found`, 422 `report-too-large`.
        """

    @abstractmethod
    async def iterations(
        self, tenant: str, run: str, after: int | None = None, limit: int | None = None
    ) -> tuple[Point, ...]:
        """Return the iterations that are remembered, oldest first.

        Args:
            tenant: the run's tenant.
            run: its name.
            after: leave out this iteration and those before it.
            limit: return at most so many.

        Raises:
            ProblemError: 404 `run-not-found`.
        """

    @abstractmethod
    async def samples(self, tenant: str, run: str) -> Samples | None:
        """Return the newest samples; None if there are none, or no such run."""

    @abstractmethod
    async def progress(self, tenant: str, runs: Sequence[str]) -> dict[str, Progress]:
        """Return where those of the runs stand, at one moment, that told an iteration."""

    @abstractmethod
    async def ping(self) -> None:
        """Return if the store answers."""

    async def warnings(self) -> tuple[str, ...]:
        """What of the store's settings may lose adapters, and what to do about it."""
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections."""


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
            f"iteration {report.iteration} has too many or too long names of rewards and phases",
            where="body",
            got=f"{size} bytes as JSON, without samples",
            expected=f"at most {MAX_POINT_BYTES} bytes",
            action="report fewer rewards and phases, or shorter names",
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
        action="delete a run that is done, unpin versions, or ask for a larger quota",
    )


def admit(info: AdapterInfo, head: int | None, stored: AdapterInfo | None) -> AdapterInfo | None:
    """Judge a put against the run's head and what is stored under the version.

    Returns:
        `stored` if the put repeats it, or None if the version may be written while `head` is still the head.

    Raises:
        ProblemError: 409 `version-conflict` or `parent-conflict`.
    """
    if stored is not None:
        given, kept = _identity(info), _identity(stored)
        if given == kept:
            return stored
        raise _conflict(info, "this version is stored already, with other content", got=given, expected=kept)
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
            f"version {info.version} of run {info.run!r} was made from {_named(info.parent)}; "
            f"the run's head is {_named(head)}",
            where="parent",
            got=info.parent,
            expected=head,
            action="two trainers may be writing to one run: give each its own, or resume from the head",
        )
    return None


def head_conflict(run: str, version: int, given: int, head: int) -> ProblemError:
    """The 409 problem for a run whose head is not the one that was to be taken back."""
    return ProblemError(
        ProblemKind.HEAD_CONFLICT,
        f"run {run!r} was to go back from version {given} to version {version}; its head is version {head}",
        where="head",
        got=given,
        expected=head,
        action="two trainers may be writing to one run; list its versions, and go back from its head",
    )


async def verify_put(info: AdapterInfo, body: bytes) -> None:
    """Refuse bytes that are not what `info` says, with 422 `digest-mismatch`: versions cannot be mended."""
    digest = await _digest(body)
    if (len(body), digest) != (info.size, info.digest):
        raise ProblemError(
            ProblemKind.DIGEST_MISMATCH,
            "the body is not what was announced",
            where="digest",
            got=f"{digest}, {len(body)} bytes",
            expected=f"{info.digest}, {info.size} bytes",
            action="send the file again",
        )


async def verify_stored(info: AdapterInfo, body: bytes) -> None:
    """Refuse stored bytes that are not what was put, with 500 `adapter-corrupt`."""
    digest = await _digest(body)
    if digest != info.digest:
        raise corrupt(info.run, info.version, got=digest, expected=info.digest)


def corrupt(run: str, version: int, *, got: str, expected: str) -> ProblemError:
    """The 500 problem for a version that cannot be read back as it was put."""
    return ProblemError(
        ProblemKind.ADAPTER_CORRUPT,
        f"version {version} of run {run!r} is damaged in the store",
        got=got,
        expected=expected,
        action="push a new version; check the store's memory policy and its host",
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
        f"run {run!r} has no version {version} in this store; its head is {head}, it holds {held}",
        where="version",
        got=version,
        expected=held,
        action="name a version that is held; old ones are deleted",
    )


async def _digest(body: bytes) -> str:
    # In a thread: a FLUX.1 adapter takes a tenth of a second and more, in which the event loop must go on.
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
