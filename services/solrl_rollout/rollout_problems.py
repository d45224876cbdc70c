"""Errors of the engine and of the store as problem documents: the only table of what HTTP says about them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import singledispatch
from typing import Any

from solrl_core.errors import AdapterError
from solrl_proto.problems import ProblemError, ProblemKind, RetryLaterError

from solrl_rollout.engine.errors import (
    AdapterDigestError,
    AdapterMemoryError,
    AdapterModelError,
    ChunkError,
    EngineDeadError,
    EngineError,
    QueueFullError,
)
from solrl_rollout.store.errors import (
    CorruptError,
    HeadConflictError,
    ParentConflictError,
    QuotaExceededError,
    ReportTooLargeError,
    RunNotFoundError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    VersionConflictError,
    VersionNotFoundError,
)

TRANSLATED = (AdapterError, EngineError, StoreError)
"""Roots of the errors that `problem_of` translates."""


@contextmanager
def as_problems() -> Iterator[None]:
    """Raise errors of the engine and the store within the block as their problems."""
    try:
        yield
    except TRANSLATED as error:
        raise problem_of(error) from error


@singledispatch
def problem_of(error: Exception) -> ProblemError:
    """The problem of an error, a `RetryLaterError` if the same request may succeed later."""
    raise TypeError(f"no problem is known for {type(error).__name__}") from error


@problem_of.register
def _(error: AdapterError) -> ProblemError:
    return ProblemError(ProblemKind[f"ADAPTER_{error.fault.upper()}"], error.detail, **error.fields)


@problem_of.register
def _(error: EngineDeadError) -> ProblemError:
    return ProblemError(
        ProblemKind.ENGINE_DEAD,
        "the last engine thread ended; this process generates no more candidates",
        action="restart the service; its log says why the thread ended",
    )


@problem_of.register
def _(error: QueueFullError) -> ProblemError:
    free = error.limit - error.waiting
    whose = f"tenant {error.tenant!r} has" if error.tenant is not None else "there are"
    return RetryLaterError(
        ProblemKind.QUEUE_FULL,
        f"{whose} {error.waiting} candidates waiting already and the limit is {error.limit}",
        retry_after=error.retry_after,
        got=error.requested,
        expected=f"at most {free} more candidates now",
        action="send the same request again later" + (", or request fewer candidates at a time" if free else ""),
    )


@problem_of.register
def _(error: AdapterMemoryError) -> ProblemError:
    return RetryLaterError(
        ProblemKind.TOO_MANY_BYTES,
        f"the adapters of {error.whose} have {error.held} bytes until they are served, and {error.size} more would "
        "exceed the limit",
        retry_after=5,
        where="body.adapter",
        got=error.size,
        expected=f"at most {max(0, error.limit - error.held)} bytes now",
        action="send the same request again later, or raise max_queued_adapter_bytes of the service",
    )


@problem_of.register
def _(error: AdapterModelError) -> ProblemError:
    return ProblemError(
        ProblemKind.ADAPTER_MODEL,
        f"the adapter was pushed for model {error.pushed_for!r}",
        where="body.adapter",
        got=error.pushed_for,
        expected=error.wanted,
        action="use a version that was pushed for this model",
    )


@problem_of.register
def _(error: AdapterDigestError) -> ProblemError:
    return ProblemError(
        ProblemKind.DIGEST_MISMATCH,
        "the body does not match its Content-Digest: it was damaged or truncated in transit",
        where="header.Content-Digest",
        got=f"{error.received}, {error.size} bytes",
        expected=error.announced,
        action="send the file again",
    )


@problem_of.register
def _(error: ChunkError) -> ProblemError:
    prompt = f"prompts.{error.prompt}"
    match error.fault:
        case "memory":
            served = f"--model {error.model} --precision {error.precision}"
            return ProblemError(
                ProblemKind.OUT_OF_MEMORY,
                f"{error.model} at {error.precision}: {error.text}",
                where="body.plan.precision",
                got=error.precision,
                action=f"`solrl-rollout memory {served}` plans what fits: use another precision, or serve smaller "
                "images, fewer models and rewards, or on a larger GPU",
            )
        case "merge":
            return _adapter_at_fault(error, ProblemKind.ADAPTER_MERGE, error.text, "finite weights after the merge")
        case "images" if error.adapter is not None:
            detail = (
                f"with this adapter, images for prompt {error.prompt!r} are not finite: its weights are finite, but "
                "too large"
            )
            expected = "an adapter with which the model produces finite images"
            return _adapter_at_fault(error, ProblemKind.ADAPTER_NONFINITE, detail, expected)
        case "images":
            return ProblemError(
                ProblemKind.GENERATION_FAILED,
                f"the model produces non-finite images for prompt {error.prompt!r}",
                where=prompt,
                action="use another precision or less guidance; other requests are still served",
            )
        case "layer":
            return ProblemError(
                ProblemKind.PRECISION_UNSUPPORTED,
                error.text,
                where="plan.precision",
                got=error.precision,
                expected="a precision that every quantised layer supports",
                action="use another precision; the model's family can keep the layer in BF16 (docs/extending)",
            )
        case "decoder":
            return ProblemError(
                ProblemKind.PRECISION_UNSUPPORTED,
                error.text,
                where="body.plan.decoder_precision",
                got=error.got,
                expected=error.expected,
                action="omit plan.decoder_precision",
            )
        case "score":
            return ProblemError(
                ProblemKind.SCORE_NONFINITE,
                f"the weighted sum of the rewards overflows for prompt {error.prompt!r}",
                where="body.rewards",
                expected="weights whose weighted sum stays within float32",
                action="use smaller weights",
            )
        case "reward":
            return ProblemError(
                ProblemKind.REWARD_FAILED,
                error.text,
                where=prompt,
                action="check that the prompt's metadata is what the reward needs, or omit the reward",
            )
        case "reward server":
            return RetryLaterError(
                ProblemKind.REWARD_FAILED,
                error.text,
                status=503,
                retry_after=5,
                where=prompt,
                action="send the same request again later, or omit the reward; the operator of the reward server can "
                "repair it",
            )
        case "adapter memory":
            return RetryLaterError(
                ProblemKind.TOO_MANY_BYTES,
                f"the adapter cannot be passed to a worker: {error.text}",
                retry_after=5,
                where="body.adapter",
                expected="memory and an open file for each adapter of an unfinished request",
                action="send the same request again later; the service needs more memory or a higher limit of open "
                "files",
            )
        case "losses":
            return ProblemError(
                ProblemKind.GENERATION_FAILED,
                f"{error.text} while generating the same candidates, which are not tried again",
                action="the service's log says how the workers ended; other requests are still served",
            )
    return ProblemError(
        ProblemKind.GENERATION_FAILED,
        "candidates could not be generated",
        action="the service's log says why; other requests are still served",
    )


def _adapter_at_fault(error: ChunkError, kind: ProblemKind, detail: str, expected: str) -> ProblemError:
    return ProblemError(
        kind,
        detail,
        where="adapter",
        got=error.adapter,
        expected=expected,
        action="use the previous version; check the training step that produced this one",
    )


@problem_of.register
def _(error: StoreUnavailableError) -> ProblemError:
    return ProblemError(
        ProblemKind.STORE_UNAVAILABLE,
        f"Redis at {error.address}: {error.fault}",
        got=error.address,
        expected="a Redis that answers",
        action="check that Redis runs, is reachable from here, and accepts writes; then try again",
    )


@problem_of.register
def _(error: StoreFullError) -> ProblemError:
    return ProblemError(
        ProblemKind.STORE_UNAVAILABLE,
        f"Redis at {error.address} is full: {error.fault}",
        expected="a Redis with memory free",
        action="delete runs, lower --retain of the service, or raise Redis' maxmemory (SOLRL_REDIS_MEMORY)",
    )


@problem_of.register
def _(error: RunNotFoundError) -> ProblemError:
    return ProblemError(
        ProblemKind.RUN_NOT_FOUND,
        f"run {error.run!r} has no adapter in this store",
        where="run",
        got=error.run,
        action="push the run's first adapter, or correct the name",
    )


@problem_of.register
def _(error: VersionNotFoundError) -> ProblemError:
    held = list(error.held)
    return ProblemError(
        ProblemKind.VERSION_NOT_FOUND,
        f"run {error.run!r} has no version {error.version} in this store; its head is {error.head}, its versions are "
        f"{held}",
        where="version",
        got=error.version,
        expected=held,
        action="use a stored version; old ones are deleted",
    )


@problem_of.register
def _(error: VersionConflictError) -> ProblemError:
    return ProblemError(
        ProblemKind.VERSION_CONFLICT,
        f"version {error.version} of run {error.run!r}: {error.fault}",
        where="version",
        got=error.got,
        expected=error.expected,
        action="versions never change: push the next one, or use another run name",
    )


@problem_of.register
def _(error: ParentConflictError) -> ProblemError:
    def named(version: int | None) -> str:
        return "none" if version is None else f"version {version}"

    return ProblemError(
        ProblemKind.PARENT_CONFLICT,
        f"version {error.version} of run {error.run!r} was trained from {named(error.parent)}; the run's head is "
        f"{named(error.head)}",
        where="parent",
        got=error.parent,
        expected=error.head,
        action="two trainers may be writing to one run: give each its own, or resume from the head",
    )


@problem_of.register
def _(error: HeadConflictError) -> ProblemError:
    return ProblemError(
        ProblemKind.HEAD_CONFLICT,
        f"run {error.run!r} cannot be rewound from version {error.given} to version {error.version}: its head is "
        f"version {error.head}",
        where="head",
        got=error.given,
        expected=error.head,
        action="two trainers may be writing to one run; list its versions, and rewind from its head",
    )


@problem_of.register
def _(error: QuotaExceededError) -> ProblemError:
    return ProblemError(
        ProblemKind.ADAPTER_QUOTA,
        f"version {error.version} of run {error.run!r} would take the tenant's adapters over their quota",
        where="body",
        got=f"{error.held} bytes with this one",
        expected=f"at most {error.quota} bytes",
        action="delete a finished run, unpin versions, or raise tenant_adapter_bytes of the service",
    )


@problem_of.register
def _(error: CorruptError) -> ProblemError:
    facts: dict[str, Any] = {"got": error.got, "expected": error.expected}
    if error.version is None:
        action = "delete the run and push it again; check who else writes to the store, and its host"
        return ProblemError(
            ProblemKind.ADAPTER_CORRUPT, f"run {error.run!r} is damaged in the store", **facts, action=action
        )
    return ProblemError(
        ProblemKind.ADAPTER_CORRUPT,
        f"version {error.version} of run {error.run!r} is damaged in the store",
        **facts,
        action="push a new version; check the store's memory policy and its host",
    )


@problem_of.register
def _(error: ReportTooLargeError) -> ProblemError:
    return ProblemError(
        ProblemKind.REPORT_TOO_LARGE,
        f"iteration {error.iteration} has too many or too long names of rewards, phases and settings",
        where="body",
        got=f"{error.size} bytes as JSON, without samples",
        expected=f"at most {error.limit} bytes",
        action="report fewer rewards, phases and settings, or shorter ones",
    )
