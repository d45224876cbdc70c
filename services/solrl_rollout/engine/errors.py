"""Errors of the engine that reach a client, as problems."""

import torch
from solrl_core.errors import RewardError, RewardUnavailableError
from solrl_engine.backend import AdapterMergeError, LayerPrecisionError
from solrl_engine.scorer import NonFiniteImagesError
from solrl_http.problem_responses import reward_failed
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_rollout.engine.work import Chunk


class EngineDeadError(ProblemError):
    """The last worker ended, or the work was cancelled."""

    def __init__(self) -> None:
        super().__init__(
            ProblemKind.ENGINE_DEAD,
            "the last engine thread ended; this process generates no more candidates",
            action="restart the service; its log has the reason",
        )


class ChunkFailedError(ProblemError):
    """A chunk could not be generated, for a reason that only the service's log has."""

    def __init__(self, detail: str = "candidates could not be generated") -> None:
        action = "the service's log has the reason; other requests are still served"
        super().__init__(ProblemKind.GENERATION_FAILED, detail, action=action)


def chunk_error(chunk: Chunk, error: Exception) -> ProblemError:
    """The problem of a chunk whose generation or scoring `error` ended."""
    model, precision, prompt = chunk.job.model, chunk.job.precision, chunk.prompt.id
    adapter = chunk.job.adapter.digest if chunk.job.adapter else None
    text, at = str(error), f"prompts.{prompt}"

    def of_adapter(kind: ProblemKind, detail: str, expected: str) -> ProblemError:
        action = "use the previous version; check the training step that produced this one"
        return ProblemError(kind, detail, where="adapter", got=adapter, expected=expected, action=action)

    match error:
        case torch.OutOfMemoryError():
            return ProblemError(
                ProblemKind.OUT_OF_MEMORY,
                f"{model} at {precision}: {text}",
                where="body.plan.precision",
                got=precision,
                action=f"`solrl-rollout memory --model {model} --precision {precision}` plans what fits: use another "
                "precision, or serve smaller images, fewer models and rewards, or on a larger GPU",
            )
        case AdapterMergeError():
            return of_adapter(ProblemKind.ADAPTER_MERGE, text, "finite weights after the merge")
        case NonFiniteImagesError() if adapter is not None:
            return of_adapter(
                ProblemKind.ADAPTER_NONFINITE,
                f"with this adapter, images for prompt {prompt!r} are not finite: its weights are finite, but too "
                "large",
                "an adapter that gives finite images",
            )
        case NonFiniteImagesError():
            return ProblemError(
                ProblemKind.GENERATION_FAILED,
                f"the model produces non-finite images for prompt {prompt!r}",
                where=at,
                action="use another precision or less guidance; other requests are still served",
            )
        case LayerPrecisionError():
            return ProblemError(
                ProblemKind.PRECISION_UNSUPPORTED,
                text,
                where="plan.precision",
                got=precision,
                expected="a precision that every quantised layer supports",
                action="use another precision; the model's family can keep the layer in BF16 (docs/extending)",
            )
        case RewardError():
            return reward_failed(text, at, away=isinstance(error, RewardUnavailableError))
    return ChunkFailedError()
