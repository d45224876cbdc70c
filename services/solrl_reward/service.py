"""One reward service process: its rewards, its batcher, and the operations behind the routes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from solrl_core.devices import require_device
from solrl_core.errors import PromptError
from solrl_core.model_options import ModelOptions, read_options
from solrl_core.reward_registry import REWARDS
from solrl_core.rewards import RewardSet
from solrl_core.rewards.frames import TAKES_CLIPS
from solrl_core.rewards.reward import PlainDefaults, check_reward
from solrl_core.rewards.trial import try_rewards
from solrl_core.rewards.wire import decode_scoring
from solrl_core.suggestions import did_you_mean
from solrl_http.problem_responses import unsuitable_prompt
from solrl_http.serving import ServiceState
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.scores import PromptCheck, PromptVerdict, RewardInfo, RewardList, ScoreAnswer, ScoreRequest

from solrl_reward.batcher import Batcher, Images, reward_stalled
from solrl_reward.reward_metrics import RewardMetrics
from solrl_reward.settings import RewardSettings

logger = logging.getLogger(__name__)


class RewardService(ServiceState):
    """A running service: its rewards, and the batcher that computes them."""

    def __init__(self, settings: RewardSettings, rewards: RewardSet, batcher: Batcher, metrics: RewardMetrics) -> None:
        self.rewards = rewards
        digests = rewards.digests()
        self.digests = {name: digests[f"reward:{name}"] for name in rewards.names}
        self._settings = settings
        self._batcher = batcher
        self._metrics = metrics
        self._scoring = asyncio.create_task(batcher.run())
        metrics.watch_queue(lambda: batcher.waiting)
        metrics.watch_costs(rewards.costs)

    @property
    def dead(self) -> bool:
        """Whether the batcher ended; only a new process can replace it."""
        return self._scoring.done()

    def require_live(self) -> None:
        """Raise 503 `reward-stalled` if a reward does not return."""
        if stalled := self._batcher.stalled:
            raise reward_stalled(stalled)

    def require_ready(self) -> None:
        """Raise 503 if no reward can be computed, or no new work is accepted."""
        self.require_accepting()
        stalled = self._batcher.stalled
        if set(self.rewards.names) <= set(stalled):
            raise reward_stalled(stalled)

    def require_capacity(self, tenant: str) -> None:
        """Check that a request for at least one image could be accepted; raises 429 `queue-full` or 503."""
        self.require_accepting()
        self._require_room(tenant, 1, None)

    def list(self) -> RewardList:
        return RewardList(
            rewards=tuple(
                RewardInfo(
                    name=name,
                    digest=self.digests[name],
                    max_latency_s=self.rewards.max_latency_s(name),
                    takes_clips=bool(getattr(REWARDS.find(source), TAKES_CLIPS, False)),
                )
                for name, source in self._settings.sources.items()
            )
        )

    async def decode(self, body: bytes) -> Images:
        """Decode the body of a request.

        Raises:
            ProblemError: 422, also for a prompt that a reward cannot judge by.
            RequestValidationError: the request in the body is not valid.
        """
        pixels, request = await asyncio.to_thread(_decode, body)
        for name in request.rewards:
            self._require_loaded(name, "body.request.rewards")
        prompts = zip(request.texts, request.metadata, strict=True)
        await asyncio.to_thread(self._require_judgeable, request.rewards, prompts)
        return Images(request.rewards, pixels, request.texts, request.metadata)

    async def check(self, request: PromptCheck) -> PromptVerdict:
        """Whether a reward can judge by prompts; raises 422 if it is not loaded."""
        self._require_loaded(request.reward, "body.reward")
        prompts = [(prompt.text, prompt.metadata) for prompt in request.prompts]
        return PromptVerdict(fault=await asyncio.to_thread(self.rewards.first_fault, request.reward, prompts))

    async def score(self, images: Images, tenant: str) -> ScoreAnswer:
        """Score the images of a request.

        Raises:
            ProblemError: 429 `queue-full`, 500 or 503 `reward-failed`, 503 `reward-stalled`, 507
                `out-of-memory`.
        """
        self._require_room(tenant, len(images), len(images))
        scores = await self._batcher.score(images, tenant)
        self._metrics.request_scored(tenant, images.rewards, len(images))
        return ScoreAnswer(
            scores={name: tuple(values.tolist()) for name, values in scores.items()},
            digests={name: self.digests[name] for name in images.rewards},
        )

    async def close(self) -> None:
        """Stop scoring after the current batch."""
        self._scoring.cancel()
        (end,) = await asyncio.gather(self._scoring, return_exceptions=True)
        if isinstance(end, Exception):
            logger.error("scoring ended with an error", exc_info=end)
        await self._batcher.close()

    def _require_room(self, tenant: str, images: int, requested: int | None) -> None:
        """Raise 429 `queue-full` if `requested` images do not fit into the queue; None if no body was read."""
        of_all = ("there are", self._batcher.waiting, self._settings.queue_limit)
        of_tenant = (f"tenant {tenant!r} has", self._batcher.waiting_of(tenant), self._settings.tenant_images)
        for whose, waiting, limit in (of_all, of_tenant):
            if waiting + images > limit:
                raise ProblemError(
                    ProblemKind.QUEUE_FULL,
                    f"{whose} {waiting} images waiting already and the limit is {limit}",
                    retry_after=1,
                    got=requested,
                    expected=f"at most {limit - waiting} more images now",
                    action="send the same request again later",
                )

    def _require_judgeable(self, rewards: Iterable[str], prompts: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise 422 `invalid-request` if one of the rewards cannot judge by one of the prompts."""
        try:
            self.rewards.require_judgeable(rewards, prompts)
        except PromptError as error:
            raise unsuitable_prompt(error.detail, "body.request.prompts", error.fields) from None

    def _require_loaded(self, name: str, where: str) -> None:
        """Raise 422 `reward-not-loaded` unless this service computes the reward."""
        if name not in self.digests:
            raise ProblemError(
                ProblemKind.REWARD_NOT_LOADED,
                f"this service does not compute {name!r}{did_you_mean(name, self.rewards.names)}",
                where=where,
                got=name,
                expected=list(self.rewards.names),
                action="name one of these, or start the service with --rewards",
            )


def _decode(body: bytes) -> tuple[torch.Tensor, ScoreRequest]:
    try:
        return decode_scoring(body)
    except ValidationError as error:
        raise RequestValidationError(
            [{**fault, "loc": ("body", "request", *fault["loc"])} for fault in error.errors(include_url=False)]
        ) from None
    except ValueError as error:
        raise ProblemError(
            ProblemKind.INVALID_REQUEST,
            f"the body has {error}",
            where="body",
            action="send a safetensors file with the tensor `images` and the metadata field `request`, see /docs",
        ) from None


@asynccontextmanager
async def running_service(settings: RewardSettings, metrics: RewardMetrics) -> AsyncIterator[RewardService]:
    """A service whose rewards are loaded; stopped at the end.

    Raises:
        ValueError, OSError: a reward cannot be loaded.
        RewardError: `try_rewards` refuses a reward.
        torch.OutOfMemoryError: the rewards do not fit.
    """
    device = torch.device(require_device(settings.device))
    rewards = await asyncio.to_thread(_load, settings, device)
    batcher = Batcher(rewards, device, settings.batch, settings.score_timeout, metrics)
    service = RewardService(settings, rewards, batcher, metrics)
    try:
        yield service
    finally:
        await service.close()


def _load(settings: RewardSettings, device: torch.device) -> RewardSet:
    for name, source in settings.sources.items():
        check_reward(source, settings.reward_options.get(name, {}), all_given=False)
    defaults = PlainDefaults(device, _options_of(settings.options_from))
    rewards = RewardSet.load(list(settings.sources), defaults, settings.reward_options, sources=settings.sources)
    try_rewards(rewards, defaults, side=256)
    return rewards


def _options_of(model: str | None) -> ModelOptions:
    if not model:
        return ModelOptions()
    from solrl_core.families.load import locate  # imports packages that a service of other rewards may lack

    return read_options(locate(model))
