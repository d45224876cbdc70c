"""Errors of the engine and of the store as problem documents."""

from collections.abc import Iterator
from contextlib import contextmanager

from solrl_core.errors import AdapterError
from solrl_proto.problems import ProblemError, ProblemKind, RetryLaterError

from solrl_rollout.engine.errors import EngineError
from solrl_rollout.store.errors import StoreError

TRANSLATED = (AdapterError, EngineError, StoreError)
"""Roots of the errors that `problem_of` translates."""


@contextmanager
def as_problems() -> Iterator[None]:
    """Raise errors of the engine and the store within the block as their problems."""
    try:
        yield
    except TRANSLATED as error:
        raise problem_of(error) from error


def problem_of(error: Exception) -> ProblemError:
    """The problem of a translated error, a `RetryLaterError` if the same request may succeed later."""
    assert isinstance(error, TRANSLATED)
    kind = ProblemKind[f"ADAPTER_{error.fault.upper()}" if isinstance(error, AdapterError) else error.kind]
    after = error.retry_after if isinstance(error, EngineError) else None
    if after is None:
        return ProblemError(kind, error.detail, **error.fields)
    # A fault that passes is no fault of the service itself.
    status = 503 if kind.status == 500 else kind.status
    return RetryLaterError(kind, error.detail, retry_after=after, status=status, **error.fields)
