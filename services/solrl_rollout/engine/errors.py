"""Errors of the engine, independent of HTTP; `solrl_rollout.rollout_problems` translates them at the edge.

A worker process sends them by name and facts, so their facts are JSON.
"""

from dataclasses import dataclass
from typing import Any, Literal

ChunkFault = Literal[
    "memory",  # not even one candidate fits, or not the weights
    "merge",  # of the adapter gives weights that are not finite
    "layer",  # of the model cannot run at the precision
    "decoder",  # cannot compute in FP8
    "images",  # are not finite
    "score",  # is not finite
    "reward",  # failed
    "reward server",  # gave no usable answer
    "adapter memory",  # has no room to pass the adapter to a worker
    "losses",  # of workers while they made it
    "other",
]


class EngineError(Exception):
    """Root of the engine's errors. Each has its facts as attributes."""

    def __str__(self) -> str:
        return repr(self)


@dataclass(eq=False)
class ChunkError(EngineError):
    """A chunk could not be generated or scored.

    Attributes:
        fault: what ended it.
        text: the fault in words; may be empty.
        model, precision: of its job.
        prompt: id of its prompt.
        adapter: digest of its adapter; None without one.
        got, expected: value at fault, and what it should have been.
    """

    fault: ChunkFault
    text: str
    model: str
    precision: str
    prompt: str
    adapter: str | None
    got: Any = None
    expected: Any = None


@dataclass(eq=False)
class EngineDeadError(EngineError):
    """The last worker ended, or the work was cancelled."""


@dataclass(eq=False)
class QueueFullError(EngineError):
    """Candidates do not fit into the queue, and none was added.

    Attributes:
        waiting: candidates that wait or for which capacity is reserved, of `tenant` or of all.
        limit: the most that may.
        tenant: the tenant whose limit is reached; None for the limit of all.
        requested: candidates of the request; None if its body was not read.
        retry_after: seconds after which there is likely to be capacity.
    """

    waiting: int
    limit: int
    tenant: str | None
    requested: int | None = None
    retry_after: int = 1


@dataclass(eq=False)
class AdapterMemoryError(EngineError):
    """An adapter does not fit into the memory for adapters of unfinished requests.

    Attributes:
        whose: "all requests" or "the tenant's requests".
        held, size, limit: bytes that are held, that the adapter takes, and that may be held.
    """

    whose: str
    held: int
    size: int
    limit: int


@dataclass(eq=False)
class AdapterModelError(EngineError):
    """An adapter version was pushed for the model `pushed_for`, not for `wanted`."""

    pushed_for: str
    wanted: str


@dataclass(eq=False)
class AdapterDigestError(EngineError):
    """A pushed body of `size` bytes has the digest `received`, where `announced` was announced."""

    received: str
    size: int
    announced: str
