"""The interface of run stores, and the rules that all of them share.

A run's versions are immutable, and their numbers increase. Each names as its parent the head that it was trained from.
A run returns to an older version only by deleting all later ones. A store checks a put with `admit` against one
consistent view of the run, and writes only if that view still holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from solrl_proto.adapters import AdapterInfo, AdapterList, RunList
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.status import IterationReport, Point, Samples

from solrl_rollout.store.errors import version_conflict

DEFAULT_RETAIN = 8
KEPT_POINTS = 10_000
"""Iterations kept per run; beyond that the oldest are deleted."""
KEPT_POINT_BYTES = 8 * 2**20
"""Bytes of a run's iterations as JSON; beyond that the oldest are deleted."""
MAX_POINT_BYTES = 16384
"""Largest iteration, as JSON without samples. One with four rewards has 1.5 kB, and a run's first, with its settings,
6 kB."""


@dataclass(frozen=True)
class Progress:
    """The last reported iteration of a run.

    Attributes:
        revision: time of that report in µs since 1970 by the store's clock, strictly increasing.
    """

    revision: int
    last: Point


class RunStore(Protocol):
    """Adapter versions, curves and samples of all runs. Any method may raise StoreUnavailableError;
    other errors are problems, too, of the kinds named below."""

    retain: int
    quota: int | None

    def __init__(self, retain: int = DEFAULT_RETAIN, quota: int | None = None) -> None:
        """Retain the newest `retain` (≥ 1) versions per run, and allow `quota` bytes of versions per tenant.

        `put` deletes older versions.
        """
        self.retain = retain
        self.quota = quota

    async def put(self, tenant: str, info: AdapterInfo, body: bytes) -> tuple[AdapterInfo, bool]:
        """Store a version and make it the run's head, atomically; return the stored version, and whether it is new.

        The caller has verified that `body` matches `info`. Putting a stored version again with the same digest and
        model succeeds, whatever its parent. Raises `version-conflict`, `parent-conflict` or
        `adapter-quota`.
        """

    async def get(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        """Return a version and its bytes, digest verified.

        Raises `run-not-found`, `version-not-found` or `adapter-corrupt`.
        """

    async def info(self, tenant: str, run: str, version: int) -> AdapterInfo:
        """Return the description of a version. Raises `run-not-found`, `version-not-found` or `adapter-corrupt`."""

    async def head(self, tenant: str, run: str) -> int | None:
        """Return the run's newest version; None if there is no such run."""

    async def list(self, tenant: str, run: str) -> AdapterList:
        """Return the run's head and all its versions, oldest first. Raises `run-not-found`."""

    async def runs(self, tenant: str) -> RunList:
        """Return all runs of a tenant, by name."""

    async def sizes(self) -> dict[str, int]:
        """Return the bytes of all versions of each tenant."""

    async def rewind(self, tenant: str, run: str, version: int, head: int) -> None:
        """Make a stored version the run's head again, atomically; later versions are deleted.

        Succeeds if `version` is the head already. Raises `run-not-found`, `version-not-found`, or `head-conflict` if
        neither `version` nor `head` is the head.
        """

    async def delete(self, tenant: str, run: str) -> None:
        """Delete a run with all its versions and iterations. Raises `run-not-found`."""

    async def add_iteration(self, tenant: str, run: str, report: IterationReport) -> int:
        """Store an iteration's report, replacing this and all later iterations; return the run's new revision.

        The newest samples are stored, too. Raises `run-not-found` or `invalid-request`.
        """

    async def iterations(self, tenant: str, run: str) -> tuple[Point, ...]:
        """Return the stored iterations, oldest first. Raises `run-not-found`."""

    async def samples(self, tenant: str, run: str) -> Samples | None:
        """Return the newest samples; None if there are none, or the run does not exist."""

    async def progress(self, tenant: str, runs: Sequence[str]) -> dict[str, Progress]:
        """Return the progress of the given runs from one consistent view, without runs that have reported nothing."""

    async def ping(self) -> None:
        """Return if the store answers, and takes writes unless it is full."""

    async def close(self) -> None:
        """Close connections."""


def encode_point(report: IterationReport) -> str:
    """The report as JSON without its samples.

    Raises:
        ProblemError: 422 `invalid-request`: it has more than `MAX_POINT_BYTES`.
    """
    text = report.model_dump_json(exclude={"samples"}, exclude_none=True)
    if (size := len(text.encode())) > MAX_POINT_BYTES:
        raise ProblemError(
            ProblemKind.INVALID_REQUEST,
            f"iteration {report.iteration} has too many or too long names of rewards, phases and settings",
            where="body",
            got=f"{size} bytes as JSON, without samples",
            expected=f"at most {MAX_POINT_BYTES} bytes",
            action="report fewer rewards, phases and settings, or shorter ones",
        )
    return text


def admit(info: AdapterInfo, head: int | None, stored: AdapterInfo | None) -> AdapterInfo | None:
    """Check a put against the run's head and the version stored under its number.

    Returns:
        `stored` if the put repeats it; None if the version may be written as long as `head` is the head.

    Raises:
        ProblemError: 409 `version-conflict` or `parent-conflict`.
    """
    run, version = info.run, info.version
    if stored is not None:
        pushed, existing = _identity(info), _identity(stored)
        if pushed == existing:
            return stored
        fault = "this version is stored already, with different content"
        raise version_conflict(run, version, fault, got=pushed, expected=existing)
    if head is not None and version <= head:
        fault = f"the run's head is version {head} and version {version} is not stored"
        raise version_conflict(run, version, fault, got=version, expected=f"a version above {head}")
    if info.parent != head:
        parent, newest = ("none" if ancestor is None else f"version {ancestor}" for ancestor in (info.parent, head))
        raise ProblemError(
            ProblemKind.PARENT_CONFLICT,
            f"version {version} of run {run!r} was trained from {parent}; the run's head is {newest}",
            where="parent",
            got=info.parent,
            expected=head,
            action="two trainers may be writing to one run: give each its own, or resume from the head",
        )
    return None


def _identity(info: AdapterInfo) -> dict[str, str]:
    return {"digest": info.digest, "model": info.model}
