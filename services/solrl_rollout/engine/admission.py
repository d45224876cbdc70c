"""The problems of a request that asks for what this service does not have, or for too much of it."""

from collections.abc import Iterable

from solrl_core.fingerprint import model_digest
from solrl_proto.identifiers import Tier
from solrl_proto.models import ModelInfo
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import FittedSolver, RolloutRequest

MAX_ANSWER_PIXELS = 2**28
"""Pixel values (1 byte each, before compression) that one answer may carry as images."""


def check_model(name: str, hosted: Iterable[str]) -> None:
    """Raises 404 `model-not-found` for a model that is not among the hosted names."""
    if name not in hosted:
        raise ProblemError(
            ProblemKind.MODEL_NOT_FOUND,
            f"this service does not host {name!r}",
            where="model",
            got=name,
            expected=sorted(hosted),
            action="name a hosted model, or start a service for this one",
        )


def check_rewards(names: Iterable[str], hosted: ModelInfo) -> None:
    """Raises 422 `reward-unknown` for a reward that was not loaded."""
    for i, name in enumerate(names):
        if name not in hosted.rewards:
            raise ProblemError(
                ProblemKind.REWARD_UNKNOWN,
                f"this service has not loaded the reward {name!r}",
                where=f"body.rewards.{i}.name",
                got=name,
                expected=list(hosted.rewards),
                action="name a loaded reward, or start the service with --rewards",
            )


def check_precision(precision: Tier, hosted: ModelInfo) -> None:
    """Raises 422 `precision-unsupported` for a tier that this service's device does not run."""
    known = [tier.precision for tier in hosted.precisions]
    if precision not in known:
        raise ProblemError(
            ProblemKind.PRECISION_UNSUPPORTED,
            f"this service's device does not compute in {precision}",
            where="body.plan.precision",
            got=precision,
            expected=known,
            action="ask for one that it does, or for auto; FP8 needs an Ada, Hopper or Blackwell GPU",
        )


def check_fitted(fitted: FittedSolver | None, hosted: ModelInfo) -> None:
    """Raises 422 `fitted-mismatch` for a solver that was fitted to another model."""
    bound = fitted.fitted_for if fitted is not None else None
    here = model_digest({part: digest for part, digest in hosted.digests.items() if not part.startswith("reward:")})
    if bound is not None and bound.model != here:
        raise ProblemError(
            ProblemKind.FITTED_MISMATCH,
            f"the plan's solver was not fitted to {hosted.name}, and would end elsewhere",
            where="body.plan.fitted.fitted_for.model",
            got=bound.model,
            expected=here,
            action="fit one for this model with `solrl-train calibrate`, or leave plan.fitted out",
        )


def check_size(request: RolloutRequest, hosted: ModelInfo, queue_limit: int) -> None:
    """Raises 422 for a request that could never be served: `too-many-candidates`, `too-many-images`."""
    asked = request.candidates
    groups = [len(seeds) for seeds in asked.seeds or ()] or [asked.count or 0] * len(request.prompts)
    total = sum(groups)
    if total > queue_limit:
        raise ProblemError(
            ProblemKind.TOO_MANY_CANDIDATES,
            "the request asks for more candidates than may ever wait here",
            where="body.candidates",
            got=total,
            expected=f"at most {queue_limit} candidates a request",
            action="send fewer prompts at a time, or raise queue_limit of the service",
        )
    most = MAX_ANSWER_PIXELS // (hosted.height * hosted.width * 3)
    if request.images != "none" and total > most:
        raise ProblemError(
            ProblemKind.TOO_MANY_IMAGES,
            "the request asks for more images than one answer carries",
            where="body.images",
            got=total,
            expected=f"at most {most} images of {hosted.width}×{hosted.height} a request",
            action="ask for images of fewer candidates at a time",
        )


def wrong_model(got: str, expected: str) -> ProblemError:
    """The 422 for an adapter that was pushed for another model than the request's."""
    return ProblemError(
        ProblemKind.ADAPTER_MODEL,
        f"the adapter was pushed for model {got!r}",
        where="body.adapter",
        got=got,
        expected=expected,
        action="name a version that was pushed for this model",
    )


def score_not_finite(prompt: str) -> ProblemError:
    """The 422 for weights that carry a score out of float32's range."""
    return ProblemError(
        ProblemKind.SCORE_NONFINITE,
        f"the weighted sum of the rewards overflows for prompt {prompt!r}",
        where="body.rewards",
        expected="weights whose weighted sum stays within float32",
        action="use smaller weights",
    )
