"""Errors of the engine. Those that reach a client are problems."""

from typing import TYPE_CHECKING, Any, Literal

from solrl_proto.problems import ProblemError, ProblemKind

if TYPE_CHECKING:
    from solrl_rollout.engine.work import Chunk

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


class EngineDeadError(ProblemError):
    """The last worker ended, or the work was cancelled."""

    def __init__(self) -> None:
        super().__init__(
            ProblemKind.ENGINE_DEAD,
            "the last engine thread ended; this process generates no more candidates",
            action="restart the service; its log says why the thread ended",
        )


def chunk_error(
    chunk: "Chunk", fault: ChunkFault, text: str = "", got: Any = None, expected: Any = None
) -> ProblemError:
    """The error of a chunk that could not be generated or scored.

    Args:
        chunk: the chunk.
        fault: what ended it.
        text: the fault in words.
        got, expected: value at fault, and what it should have been.
    """
    model, precision, prompt = chunk.job.model, chunk.job.precision, chunk.prompt.id
    adapter = chunk.job.adapter.digest if chunk.job.adapter else None

    def of_adapter(kind: ProblemKind, detail: str, expected: str) -> ProblemError:
        action = "use the previous version; check the training step that produced this one"
        return ProblemError(kind, detail, where="adapter", got=adapter, expected=expected, action=action)

    at = f"prompts.{prompt}"
    match fault:
        case "memory":
            return ProblemError(
                ProblemKind.OUT_OF_MEMORY,
                f"{model} at {precision}: {text}",
                where="body.plan.precision",
                got=precision,
                action=f"`solrl-rollout memory --model {model} --precision {precision}` plans what fits: use another "
                "precision, or serve smaller images, fewer models and rewards, or on a larger GPU",
            )
        case "merge":
            return of_adapter(ProblemKind.ADAPTER_MERGE, text, "finite weights after the merge")
        case "images" if adapter is not None:
            return of_adapter(
                ProblemKind.ADAPTER_NONFINITE,
                f"with this adapter, images for prompt {prompt!r} are not finite: its weights are finite, but too "
                "large",
                "an adapter with which the model produces finite images",
            )
        case "images":
            return ProblemError(
                ProblemKind.GENERATION_FAILED,
                f"the model produces non-finite images for prompt {prompt!r}",
                where=at,
                action="use another precision or less guidance; other requests are still served",
            )
        case "layer":
            return ProblemError(
                ProblemKind.PRECISION_UNSUPPORTED,
                text,
                where="plan.precision",
                got=precision,
                expected="a precision that every quantised layer supports",
                action="use another precision; the model's family can keep the layer in BF16 (docs/extending)",
            )
        case "decoder":
            return ProblemError(
                ProblemKind.PRECISION_UNSUPPORTED,
                text,
                where="body.plan.decoder_precision",
                got=got,
                expected=expected,
                action="omit plan.decoder_precision",
            )
        case "score":
            return ProblemError(
                ProblemKind.SCORE_NONFINITE,
                f"the weighted sum of the rewards overflows for prompt {prompt!r}",
                where="body.rewards",
                expected="weights whose weighted sum stays within float32",
                action="use smaller weights",
            )
        case "reward":
            return ProblemError(
                ProblemKind.REWARD_FAILED,
                text,
                where=at,
                action="check that the prompt's metadata is what the reward needs, or omit the reward",
            )
        case "reward server":
            return ProblemError(
                ProblemKind.REWARD_FAILED,
                text,
                status=503,
                retry_after=5,
                where=at,
                action="send the same request again later, or omit the reward; the operator of the reward server can "
                "repair it",
            )
        case "adapter memory":
            return ProblemError(
                ProblemKind.TOO_MANY_BYTES,
                f"the adapter cannot be passed to a worker: {text}",
                retry_after=5,
                where="body.adapter",
                expected="memory and an open file for each adapter of an unfinished request",
                action="send the same request again later; the service needs more memory or a higher limit of open "
                "files",
            )
        case "losses":
            return ProblemError(
                ProblemKind.GENERATION_FAILED,
                f"{text} while generating the same candidates, which are not tried again",
                action="the service's log says how the workers ended; other requests are still served",
            )
    return ProblemError(
        ProblemKind.GENERATION_FAILED,
        "candidates could not be generated",
        action="the service's log says why; other requests are still served",
    )
