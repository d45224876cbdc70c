"""Errors of the engine. Each says what is wrong, at what, and the remedy; HTTP's statuses are the edge's.

A worker process sends them by name and facts, so their facts are JSON.
"""

from typing import Any, Literal

from solrl_core.errors import SolrlError

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


class EngineError(SolrlError):
    """Root of the engine's errors.

    Attributes:
        kind: name of its `ProblemKind`.
        retry_after: seconds after which the same request may succeed; None if it will not.
    """

    kind = ""
    retry_after: int | None = None


class ChunkError(EngineError):
    """A chunk could not be generated or scored; `fault` is what ended it."""

    def __init__(
        self,
        fault: ChunkFault,
        text: str,
        *,
        model: str,
        precision: str,
        prompt: str,
        adapter: str | None,
        got: Any = None,
        expected: Any = None,
    ) -> None:
        """Say what ended a chunk.

        Args:
            fault: what ended it.
            text: the fault in words; may be empty.
            model, precision: of its job.
            prompt: id of its prompt.
            adapter: digest of its adapter; None without one.
            got, expected: value at fault, and what it should have been.
        """
        self.fault = fault
        at_prompt = f"prompts.{prompt}"
        of_adapter: dict[str, Any] = {
            "where": "adapter",
            "got": adapter,
            "action": "use the previous version; check the training step that produced this one",
        }
        match fault:
            case "memory":
                self._say(
                    "OUT_OF_MEMORY",
                    f"{model} at {precision}: {text}",
                    where="body.plan.precision",
                    got=precision,
                    action=f"`solrl-rollout memory --model {model} --precision {precision}` plans what fits: use "
                    "another precision, or serve smaller images, fewer models and rewards, or on a larger GPU",
                )
            case "merge":
                self._say("ADAPTER_MERGE", text, expected="finite weights after the merge", **of_adapter)
            case "images" if adapter is not None:
                self._say(
                    "ADAPTER_NONFINITE",
                    f"with this adapter, images for prompt {prompt!r} are not finite: its weights are finite, but too "
                    "large",
                    expected="an adapter with which the model produces finite images",
                    **of_adapter,
                )
            case "images":
                self._say(
                    "GENERATION_FAILED",
                    f"the model produces non-finite images for prompt {prompt!r}",
                    where=at_prompt,
                    action="use another precision or less guidance; other requests are still served",
                )
            case "layer":
                self._say(
                    "PRECISION_UNSUPPORTED",
                    text,
                    where="plan.precision",
                    got=precision,
                    expected="a precision that every quantised layer supports",
                    action="use another precision; the model's family can keep the layer in BF16 (docs/extending)",
                )
            case "decoder":
                self._say(
                    "PRECISION_UNSUPPORTED",
                    text,
                    where="body.plan.decoder_precision",
                    got=got,
                    expected=expected,
                    action="omit plan.decoder_precision",
                )
            case "score":
                self._say(
                    "SCORE_NONFINITE",
                    f"the weighted sum of the rewards overflows for prompt {prompt!r}",
                    where="body.rewards",
                    expected="weights whose weighted sum stays within float32",
                    action="use smaller weights",
                )
            case "reward":
                self._say(
                    "REWARD_FAILED",
                    text,
                    where=at_prompt,
                    action="check that the prompt's metadata is what the reward needs, or omit the reward",
                )
            case "reward server":
                self._say(
                    "REWARD_FAILED",
                    text,
                    retry_after=5,
                    where=at_prompt,
                    action="send the same request again later, or omit the reward; the operator of the reward server "
                    "can repair it",
                )
            case "adapter memory":
                self._say(
                    "TOO_MANY_BYTES",
                    f"the adapter cannot be passed to a worker: {text}",
                    retry_after=5,
                    where="body.adapter",
                    expected="memory and an open file for each adapter of an unfinished request",
                    action="send the same request again later; the service needs more memory or a higher limit of open "
                    "files",
                )
            case "losses":
                self._say(
                    "GENERATION_FAILED",
                    f"{text} while generating the same candidates, which are not tried again",
                    action="the service's log says how the workers ended; other requests are still served",
                )
            case _:
                self._say(
                    "GENERATION_FAILED",
                    "candidates could not be generated",
                    action="the service's log says why; other requests are still served",
                )

    def _say(self, kind: str, detail: str, *, retry_after: int | None = None, **fields: Any) -> None:
        self.kind, self.retry_after = kind, retry_after
        super().__init__(detail, **fields)


class EngineDeadError(EngineError):
    """The last worker ended, or the work was cancelled."""

    kind = "ENGINE_DEAD"

    def __init__(self) -> None:
        super().__init__(
            "the last engine thread ended; this process generates no more candidates",
            action="restart the service; its log says why the thread ended",
        )


class QueueFullError(EngineError):
    """Candidates do not fit into the queue, and none was added; `got` is their number, if the request's body was read.

    Args:
        waiting: candidates that wait or for which capacity is reserved, of `tenant` or of all.
        limit: the most that may.
        tenant: the tenant whose limit is reached; None for the limit of all.
    """

    kind = "QUEUE_FULL"
    retry_after = 1

    def __init__(self, waiting: int, limit: int, tenant: str | None) -> None:
        free = limit - waiting
        whose = f"tenant {tenant!r} has" if tenant is not None else "there are"
        super().__init__(
            f"{whose} {waiting} candidates waiting already and the limit is {limit}",
            expected=f"at most {free} more candidates now",
            action="send the same request again later" + (", or request fewer candidates at a time" if free else ""),
        )


class AdapterMemoryError(EngineError):
    """An adapter does not fit into the memory for adapters of unfinished requests.

    Args:
        whose: "all requests" or "the tenant's requests".
        held, size, limit: bytes that are held, that the adapter takes, and that may be held.
    """

    kind = "TOO_MANY_BYTES"
    retry_after = 5

    def __init__(self, whose: str, held: int, size: int, limit: int) -> None:
        super().__init__(
            f"the adapters of {whose} have {held} bytes until they are served, and {size} more would exceed the limit",
            where="body.adapter",
            got=size,
            expected=f"at most {max(0, limit - held)} bytes now",
            action="send the same request again later, or raise max_queued_adapter_bytes of the service",
        )


class AdapterModelError(EngineError):
    """An adapter version was pushed for the model `pushed_for`, not for `wanted`."""

    kind = "ADAPTER_MODEL"

    def __init__(self, pushed_for: str, wanted: str) -> None:
        super().__init__(
            f"the adapter was pushed for model {pushed_for!r}",
            where="body.adapter",
            got=pushed_for,
            expected=wanted,
            action="use a version that was pushed for this model",
        )


class AdapterDigestError(EngineError):
    """A pushed body of `size` bytes has the digest `received`, where `announced` was announced."""

    kind = "DIGEST_MISMATCH"

    def __init__(self, received: str, size: int, announced: str) -> None:
        super().__init__(
            "the body does not match its Content-Digest: it was damaged or truncated in transit",
            where="header.Content-Digest",
            got=f"{received}, {size} bytes",
            expected=announced,
            action="send the file again",
        )
