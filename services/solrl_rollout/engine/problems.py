"""Problems of work that the engine cannot accept, or cannot finish."""

from collections.abc import Collection

import torch
from solrl_core.errors import DecoderError, RewardError, RewardUnavailableError
from solrl_engine.backend import AdapterMergeError, LayerPrecisionError
from solrl_engine.scorer import NonFiniteImagesError
from solrl_proto.problems import ProblemError, ProblemKind, RetryLaterError

from solrl_rollout.engine.work import Chunk


def queue_full(
    waiting: int, limit: int, tenant: str | None, *, requested: int | None, retry_after: int
) -> RetryLaterError:
    """The 429 for candidates that exceed the limit of the queue, or of one tenant.

    Args:
        waiting: number of candidates that wait already, of the tenant or of all.
        limit: the most that may wait.
        tenant: the tenant whose limit is reached; None for the limit of the whole queue.
        requested: candidates of the request; None if its body was not read.
        retry_after: seconds after which there is likely to be capacity.
    """
    free = limit - waiting
    whose = f"tenant {tenant!r} has" if tenant is not None else "there are"
    return RetryLaterError(
        ProblemKind.QUEUE_FULL,
        f"{whose} {waiting} candidates waiting already and the limit is {limit}",
        retry_after=retry_after,
        got=requested,
        expected=f"at most {free} more candidates now",
        action="send the same request again later" + (", or request fewer candidates at a time" if free else ""),
    )


def engine_dead() -> ProblemError:
    """The 503 after the last worker ended."""
    return ProblemError(
        ProblemKind.ENGINE_DEAD,
        "the last engine thread ended; this process generates no more candidates",
        action="restart the service; its log says why the thread ended",
    )


def generation_failed() -> ProblemError:
    """The 500 for a chunk that failed by no fault of the request."""
    return ProblemError(
        ProblemKind.GENERATION_FAILED,
        "candidates could not be generated",
        action="the service's log says why; other requests are still served",
    )


def no_worker_serves(workers: int) -> RetryLaterError:
    """The 503 while all workers restart."""
    return RetryLaterError(
        ProblemKind.ENGINE_STALLED,
        f"none of the {workers} workers is serving; all are being restarted",
        retry_after=10,
        action="wait; the service's log says how the workers ended",
    )


def workers_lost(losses: int) -> ProblemError:
    """The 500 for a chunk whose workers died repeatedly."""
    return ProblemError(
        ProblemKind.GENERATION_FAILED,
        f"{losses} workers died while generating the same candidates, which are not tried again",
        action="the service's log says how the workers ended; other requests are still served",
    )


def problem_of(error: Exception, chunk: Chunk) -> ProblemError | None:
    """The problem of a chunk that an error ended; None if the error is of no known kind."""
    job, prompt = chunk.job, chunk.prompt.id
    digest = job.adapter.digest if job.adapter else None
    match error:
        case ProblemError():
            return error
        case torch.OutOfMemoryError():
            return out_of_memory(job.model, job.precision, str(error))
        case AdapterMergeError():
            return adapter_merge(str(error), digest)
        case LayerPrecisionError():
            return layer_unsupported(str(error), job.precision)
        case DecoderError():
            return fp8_decoder_unsupported(error)
        case NonFiniteImagesError():
            return images_nonfinite(prompt, digest)
        case RewardUnavailableError():
            return reward_unavailable(str(error), prompt)
        case RewardError():
            return reward_failed(str(error), prompt)
    return None


def out_of_memory(model: str, precision: str, fault: str) -> ProblemError:
    """The 507 for a single candidate, or for weights, that do not fit into memory."""
    return ProblemError(
        ProblemKind.OUT_OF_MEMORY,
        f"{model} at {precision}: {fault}",
        where="body.plan.precision",
        got=precision,
        action=f"`solrl-rollout memory --model {model} --precision {precision}` plans what fits: use another "
        "precision, or serve smaller images, fewer models and rewards, or on a larger GPU",
    )


def no_room_for_adapter(fault: OSError) -> RetryLaterError:
    """The 503 for an adapter for which the service has no memory, or no file descriptor, to pass it to a worker."""
    return RetryLaterError(
        ProblemKind.TOO_MANY_BYTES,
        f"the adapter cannot be passed to a worker: {fault.strerror or fault}",
        retry_after=5,
        where="body.adapter",
        expected="memory and an open file for each adapter of an unfinished request",
        action="send the same request again later; the service needs more memory or a higher limit of open files",
    )


def adapter_merge(fault: str, digest: str | None) -> ProblemError:
    """The 422 for an adapter whose merge gives non-finite weights."""
    return ProblemError(
        ProblemKind.ADAPTER_MERGE,
        fault,
        where="adapter",
        got=digest,
        expected="finite weights after the merge",
        action="use the previous version; check the training step that produced this one",
    )


def fp8_decoder_unsupported(error: DecoderError) -> ProblemError:
    """The 422 for a decoder that has no convolutions to compute in FP8."""
    said = error.fields | {"where": "body.plan.decoder_precision", "action": "omit plan.decoder_precision"}
    return ProblemError(ProblemKind.PRECISION_UNSUPPORTED, error.detail, **said)


def images_nonfinite(prompt: str, digest: str | None) -> ProblemError:
    """The problem of non-finite images: the adapter's fault if there is one (422), otherwise the model's (500)."""
    if digest is None:
        return ProblemError(
            ProblemKind.GENERATION_FAILED,
            f"the model produces non-finite images for prompt {prompt!r}",
            where=f"prompts.{prompt}",
            action="use another precision or less guidance; other requests are still served",
        )
    return ProblemError(
        ProblemKind.ADAPTER_NONFINITE,
        f"with this adapter, images for prompt {prompt!r} are not finite: its weights are finite, but too large",
        where="adapter",
        got=digest,
        expected="an adapter with which the model produces finite images",
        action="use the previous version; check the training step that produced this one",
    )


def layer_unsupported(fault: str, precision: str) -> ProblemError:
    """The 422 for a precision at which a layer of the model cannot run."""
    return ProblemError(
        ProblemKind.PRECISION_UNSUPPORTED,
        fault,
        where="plan.precision",
        got=precision,
        expected="a precision that every quantised layer supports",
        action="use another precision; the model's family can keep the layer in BF16 (docs/extending)",
    )


def reward_failed(fault: str, prompt: str) -> ProblemError:
    """The 500 for a reward that failed on a prompt's candidates."""
    return ProblemError(
        ProblemKind.REWARD_FAILED,
        fault,
        where=f"prompts.{prompt}",
        action="check that the prompt's metadata is what the reward needs, or omit the reward",
    )


def reward_unavailable(fault: str, prompt: str) -> RetryLaterError:
    """The 503 for a reward whose server gives no usable answer."""
    return RetryLaterError(
        ProblemKind.REWARD_FAILED,
        fault,
        status=503,
        retry_after=5,
        where=f"prompts.{prompt}",
        action="send the same request again later, or omit the reward; the operator of the reward server can repair it",
    )


def reward_server_refused(fault: str, where: str, hosts: Collection[str], got: str | None = None) -> ProblemError:
    """The 422 for a reward server of a run whose address the operator has not listed; `hosts` are those listed."""
    return ProblemError(
        ProblemKind.REWARD_UNKNOWN,
        fault,
        where=where,
        got=got,
        expected=list(hosts) or "no address",
        action="use a listed address or a loaded reward, or ask the operator to start the service with --reward-hosts",
    )


def score_nonfinite(prompt: str) -> ProblemError:
    """The 422 for reward weights that take a score out of float32's range."""
    return ProblemError(
        ProblemKind.SCORE_NONFINITE,
        f"the weighted sum of the rewards overflows for prompt {prompt!r}",
        where="body.rewards",
        expected="weights whose weighted sum stays within float32",
        action="use smaller weights",
    )
