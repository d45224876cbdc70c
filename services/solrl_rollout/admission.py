"""Admission: checks that this service can serve a request, before any of its work is queued."""

from collections.abc import Collection, Sequence

from solrl_client.addresses import origin
from solrl_core.errors import PromptError
from solrl_core.fingerprint import model_digest
from solrl_core.model_options import size_text
from solrl_core.reward_registry import REWARDS
from solrl_core.rewards.reward import require_all_judgeable
from solrl_core.suggestions import did_you_mean
from solrl_http.problem_responses import unsuitable_prompt
from solrl_proto.identifiers import Precision
from solrl_proto.models import ModelInfo
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import FittedSolver, RewardSpec, RolloutRequest

from solrl_rollout.engine.work import ExternalReward, HostedModel

MAX_ANSWER_PIXELS = 2**28
"""Pixel values (1 byte each, before compression) that one answer may contain as images."""


def check_request(request: RolloutRequest, hosted: HostedModel, most_queued: int, answer_limit: int) -> Precision:
    """Check a request against the model that it names; returns the precision that it will run at.

    Args:
        most_queued: the most candidates of one tenant in the queue.
        answer_limit: the most `answer_bytes`.

    Raises:
        ProblemError: 422 `reward-not-loaded`, `too-many-candidates`, `precision-unsupported`,
            `fitted-mismatch` or `invalid-request`.
    """
    _check_rewards(request.rewards, hosted.info)
    _check_size(request, hosted.info, most_queued)
    _check_images(request, hosted.info, answer_limit)
    precision = hosted.default_precision if request.plan.precision == "auto" else request.plan.precision
    _check_precision(precision, hosted.info)
    _check_fitted(request.plan.fitted, hosted.info)
    return precision


def check_prompts(request: RolloutRequest, hosted: HostedModel) -> None:
    """Check that the rewards of a request that this service computes can judge by its prompts and their metadata.

    Reward servers check the prompts of their own rewards. The first request imports the code of the rewards.

    Raises:
        ProblemError: 422 `invalid-request` with the first unsuitable field.
    """
    names = (reward.name for reward in request.rewards if reward.at is None)
    rewards = {name: REWARDS.find(name) for name in names if name not in hosted.remote_rewards}
    try:
        require_all_judgeable(rewards, ((prompt.text, prompt.metadata) for prompt in request.prompts))
    except PromptError as error:
        raise unsuitable_prompt(error.detail, "body.prompts", error.fields) from None


def answer_bytes(request: RolloutRequest, hosted: ModelInfo) -> int:
    """Bytes that images in the answer to a request may take in memory: their values, and files of them in base64."""
    if request.images == "none":
        return 0
    values = hosted.frames * hosted.height * hosted.width * 3
    file = values + values // 64 + 1024  # of noise, which does not compress
    return _candidates(request) * (values + 4 * -(-file // 3))


def external_rewards_of(rewards: Sequence[RewardSpec], hosts: Collection[str]) -> dict[str, ExternalReward]:
    """The rewards of a request that the run brings, by name, with their addresses as the operator lists them.

    Args:
        rewards: rewards of the request.
        hosts: the only addresses allowed, each as `origin` spells it.

    Raises:
        ProblemError: 422 `reward-not-loaded` for any other address.
    """
    return {
        reward.name: ExternalReward(_allowed(reward.at, hosts, f"body.rewards.{i}.at"), reward.digest)
        for i, reward in enumerate(rewards)
        if reward.at is not None
    }


def _allowed(at: str, hosts: Collection[str], where: str) -> str:
    address = None
    fault = (
        "this service calls only the reward servers that its operator has listed"
        if hosts
        else "this service does not call reward servers named in requests"
    )
    try:
        address = origin(at, "address of a reward server")
    except ValueError as error:
        fault = str(error)
    if address is None or address not in hosts:
        raise ProblemError(
            ProblemKind.REWARD_NOT_LOADED,
            fault,
            where=where,
            got=address,
            expected=list(hosts) or "no address",
            action="use a listed address or a loaded reward, or ask the operator to start the service with "
            "--reward-hosts",
        )
    return address


def _check_rewards(rewards: Sequence[RewardSpec], hosted: ModelInfo) -> None:
    for i, reward in enumerate(rewards):
        if reward.at is None and reward.name not in hosted.rewards:
            raise ProblemError(
                ProblemKind.REWARD_NOT_LOADED,
                f"this service has not loaded the reward {reward.name!r}{did_you_mean(reward.name, hosted.rewards)}",
                where=f"body.rewards.{i}.name",
                got=reward.name,
                expected=list(hosted.rewards),
                action="use a loaded reward, or start the service with --rewards",
            )


def _check_precision(precision: Precision, hosted: ModelInfo) -> None:
    supported = [info.precision for info in hosted.precisions]
    if precision not in supported:
        raise ProblemError(
            ProblemKind.PRECISION_UNSUPPORTED,
            f"this service's device does not compute in {precision}",
            where="body.plan.precision",
            got=precision,
            expected=supported,
            action="use a supported precision, or auto; FP8 needs an Ada, Hopper or Blackwell GPU",
        )


def _check_fitted(fitted: FittedSolver | None, hosted: ModelInfo) -> None:
    target = fitted.fitted_for if fitted is not None else None
    digest = model_digest(hosted.digests)
    if target is not None and target.model != digest:
        raise ProblemError(
            ProblemKind.FITTED_MISMATCH,
            f"the plan's solver was fitted to a different model than {hosted.name}",
            where="body.plan.fitted.fitted_for.model",
            got=target.model,
            expected=digest,
            action="fit one for this model with `solrl-train calibrate`, or omit plan.fitted",
        )


def _check_size(request: RolloutRequest, hosted: ModelInfo, most_queued: int) -> None:
    """Refuse a request that does not fit into an empty queue, or wants images that the model does not make."""
    total = _candidates(request)
    if total > most_queued:
        raise ProblemError(
            ProblemKind.TOO_MANY_CANDIDATES,
            "the request has more candidates than fit into this service's queue",
            where="body.candidates",
            got=total,
            expected=f"at most {most_queued} candidates per request",
            action="send fewer prompts at a time, or raise queue_limit or tenant_queue_limit of the service",
        )
    kind, media = ("webp", "clips") if hosted.frames > 1 else ("png", "images")
    if request.images not in ("none", kind):
        raise ProblemError(
            ProblemKind.INVALID_REQUEST,
            f"{hosted.name} makes {media}",
            where="body.images",
            got=request.images,
            expected=["none", kind],
            action=f"ask for {kind}",
        )


def _check_images(request: RolloutRequest, hosted: ModelInfo, limit: int) -> None:
    """Refuse a request whose images do not fit into one answer."""
    if request.images == "none":
        return
    total = _candidates(request)
    room = min(
        MAX_ANSWER_PIXELS // (hosted.frames * hosted.height * hosted.width * 3),
        limit * total // max(1, answer_bytes(request, hosted)),
    )
    if total > room:
        raise ProblemError(
            ProblemKind.TOO_MANY_CANDIDATES,
            "the request wants more images than fit into one answer",
            where="body.images",
            got=total,
            expected=f"at most {room} {'clips' if hosted.frames > 1 else 'images'} of {size_text(hosted)} per request",
            action="request images of fewer candidates at a time",
        )


def _candidates(request: RolloutRequest) -> int:
    requested = request.candidates
    if requested.seeds is not None:
        return sum(map(len, requested.seeds))
    return (requested.count or 0) * len(request.prompts)
