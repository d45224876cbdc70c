"""The refusal of a service that is stopping."""

from solrl_proto.problems import ProblemError, ProblemKind


def draining(
    detail: str = "the service is stopping: it finishes accepted work and refuses new work",
) -> ProblemError:
    """The 503 of a service that is stopping."""
    return ProblemError(
        ProblemKind.DRAINING,
        detail,
        retry_after=10,
        action="send the same request to another replica, or again after the restart",
    )
