"""Problems of requests that cannot be scored."""

from collections.abc import Sequence

from solrl_core.suggestions import did_you_mean
from solrl_proto.problems import ProblemError, ProblemKind


def queue_full(waiting: int, limit: int, tenant: str | None, requested: int | None) -> ProblemError:
    """The 429 for images that exceed the limit of the queue, or of one tenant.

    Args:
        waiting: number of images that wait already, of the tenant or of all.
        limit: the most that may wait.
        tenant: the tenant whose limit is reached; None for the limit of the whole queue.
        requested: images of the request; None if its body was not read.
    """
    whose = f"tenant {tenant!r} has" if tenant is not None else "there are"
    return ProblemError(
        ProblemKind.QUEUE_FULL,
        f"{whose} {waiting} images waiting already and the limit is {limit}",
        retry_after=1,
        got=requested,
        expected=f"at most {limit - waiting} more images now",
        action="send the same request again later",
    )


def invalid_body(fault: str) -> ProblemError:
    """The 422 for a body that is not a request for scores."""
    return ProblemError(
        ProblemKind.INVALID_REQUEST,
        f"the body has {fault}",
        where="body",
        action="send a safetensors file with the tensor `images` and the metadata field `request`; /docs describes it",
    )


def not_loaded(name: str, loaded: Sequence[str], where: str = "body.request.rewards") -> ProblemError:
    """The 422 for a reward that this service does not compute."""
    return ProblemError(
        ProblemKind.REWARD_NOT_LOADED,
        f"this service does not compute {name!r}{did_you_mean(name, loaded)}",
        where=where,
        got=name,
        expected=list(loaded),
        action="name one of these, or start the service with --rewards",
    )


def reward_failed(fault: str) -> ProblemError:
    """The 500 for a reward that failed on the images of one request."""
    return ProblemError(
        ProblemKind.REWARD_FAILED,
        fault,
        where="body",
        action="check that the prompts' metadata is what the reward needs, or omit the reward",
    )


def reward_unavailable(fault: str) -> ProblemError:
    """The 503 for a reward that asks another server, which gives no usable answer."""
    return ProblemError(
        ProblemKind.REWARD_FAILED,
        fault,
        status=503,
        retry_after=5,
        where="body",
        action="send the same request again later, or omit the reward; the operator of that server can repair it",
    )


def reward_stalled(rewards: Sequence[str], limit: float | None = None) -> ProblemError:
    """The 503 for rewards that have not returned within a limit in seconds, or not since."""
    names = ", ".join(map(repr, rewards))
    return ProblemError(
        ProblemKind.REWARD_STALLED,
        f"reward {names} did not return within {limit:g} s" if limit else f"reward {names} has not returned",
        retry_after=5,
        where="body.request.rewards",
        action="omit it, or wait until the service is started again, which its operator should do; raise score_timeout "
        "of the service if the reward needs longer",
    )


def out_of_memory() -> ProblemError:
    """The 507 for a device on which not even one image can be scored."""
    return ProblemError(
        ProblemKind.OUT_OF_MEMORY,
        "the device's memory cannot fit a single image of this size",
        where="body",
        action="send smaller images, serve fewer rewards, or use a larger device",
    )
