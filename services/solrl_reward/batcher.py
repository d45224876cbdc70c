"""Batches across callers: requests that wait are scored together, and their scores are split again.

Tenants take turns: the next batch begins with the tenant with the fewest scored pixels.

A reward's score of an image does not depend on the rest of its batch, beyond rounding: the registry's contract.
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from solrl_client.cancellation import Cancellation, current
from solrl_core.errors import RewardError, RewardUnavailableError
from solrl_core.rewards import RewardSet
from solrl_core.rewards.images import as_floats, scored_pixels
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.side_stream import in_thread
from solrl_http.fair_share import FairShare
from solrl_http.problem_responses import internal_error, reward_failed
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_reward.reward_metrics import RewardMetrics

logger = logging.getLogger(__name__)

Scores = dict[str, torch.Tensor]
"""Float32 [N] by reward."""

_MOST_PIXELS = 24 * 1024**2
"""Pixels that are scored at once, as `Images.cost` counts them; in float32, they take 288 MiB."""
_END_S = 5.0
"""Seconds for the last batch to end."""
THREAD = "solrl-scoring"
"""Name of the threads that score."""


@dataclass(frozen=True)
class Images:
    """Images of one request, uint8 [N, 3, H, W], or clips [N, F, 3, H, W], with what rewards need to score them."""

    rewards: tuple[str, ...]
    pixels: torch.Tensor
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def cost(self) -> int:
        """Pixels that rewards have to process."""
        *images, _, height, width = self.pixels.shape
        return math.prod(images) * scored_pixels(height, width)

    def fits(self, other: "Images") -> bool:
        """Whether both can be in one batch: the same rewards, in order, and the same size."""
        return self.rewards == other.rewards and self.pixels.shape[1:] == other.pixels.shape[1:]

    def rows(self, rows: slice) -> "Images":
        return Images(self.rewards, self.pixels[rows], self.prompts[rows], self.metadata[rows])

    @staticmethod
    def join(parts: Sequence["Images"]) -> "Images":
        """The images of all parts, which fit each other."""
        if len(parts) == 1:
            return parts[0]
        prompts = [prompt for part in parts for prompt in part.prompts]
        metadata = [entry for part in parts for entry in part.metadata]
        return Images(parts[0].rewards, torch.cat([part.pixels for part in parts]), prompts, metadata)


@dataclass(eq=False)
class _Waiting:
    images: Images
    tenant: str
    answer: "asyncio.Future[Scores]"


class _Progress:
    """The reward that a batch has come to, and when. Any thread may read it."""

    def __init__(self, reward: str) -> None:
        self.begin(reward)

    def begin(self, reward: str) -> None:
        """Begin the next reward; RewardUnavailableError if all calls that wait for its scores were cancelled."""
        if current().is_set():
            raise RewardUnavailableError(reward, "was not computed: nobody waits for it any more")
        self.at = (reward, time.monotonic())


class Batcher:
    """A queue of images, which are scored batch by batch, in a thread.

    A reward that does not return in time is *stalled*: its thread is left behind, and the reward computes nothing until
    it returns.

    Call methods on the event loop's thread; read `waiting` on any thread.
    """

    def __init__(
        self, rewards: RewardSet, device: torch.device, batch_limit: int, timeout: float, metrics: RewardMetrics
    ) -> None:
        """Prepare the batcher; `run` scores.

        Args:
            batch_limit: most images in a batch of several requests.
            timeout: most seconds of a reward, apart from the seconds that it waits for another service.
        """
        self._rewards = rewards
        self._device = device
        self._batch_limit = batch_limit
        self._timeout = timeout
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._images: Counter[str] = Counter()
        """Waiting images by tenant."""
        self._shares: FairShare[str] = FairShare()
        self._arrived = asyncio.Event()
        self._batch: Sequence[_Waiting] = ()
        """The batch that is scored, or was last."""
        self._cancelled = Cancellation()
        """Cancels the batch's requests to other services."""
        self._call: Future[list[Scores | ProblemError]] | None = None
        self._abandoned: dict[str, Future[Any]] = {}
        """Calls that did not return in time, by reward."""

    @property
    def waiting(self) -> int:
        return sum(tuple(self._images.values()))  # a copy, for the thread of a scrape

    @property
    def stalled(self) -> tuple[str, ...]:
        """Rewards that have not returned in time, and not since."""
        return tuple(reward for reward, call in self._abandoned.items() if not call.done())

    def waiting_of(self, tenant: str) -> int:
        return self._images[tenant]

    async def score(self, images: Images, tenant: str) -> Scores:
        """Score images, perhaps in one batch with other requests. A cancelled call's images leave the queue.

        A batch that is being scored waits for no other service once all its calls are cancelled.

        Raises:
            ProblemError: 500 or 503 `reward-failed`, 503 `reward-stalled`, 507 `out-of-memory`.
        """
        self._require_none_stalled(images.rewards)
        request = _Waiting(images, tenant, asyncio.get_running_loop().create_future())
        if tenant not in self._images:
            self._shares.arrive(tenant, self._images.keys())
        self._waiting.append(request)
        self._images[tenant] += len(images)
        self._arrived.set()
        try:
            return await request.answer
        except asyncio.CancelledError:
            if request in self._waiting:
                self._remove(request)
            elif all(request.answer.done() for request in self._batch):
                self._cancelled.set()
            raise

    async def run(self) -> None:
        """Score whatever waits, one batch at a time, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                self._batch = batch = self._next_batch()
                self._cancelled = Cancellation()
                try:
                    results = await self._results(batch)
                except ProblemError as error:
                    results = [error for _ in batch]
                for request, result in zip(batch, results, strict=True):
                    if request.answer.done():
                        continue  # its caller left
                    if isinstance(result, ProblemError):
                        request.answer.set_exception(result)
                    else:
                        request.answer.set_result(result)

    async def close(self) -> None:
        """Wait for the last batch. A call that does not end soon is left running."""
        self._cancelled.set()
        if self._call is not None:
            await asyncio.to_thread(wait, [self._call], _END_S)

    async def _results(self, batch: Sequence[_Waiting]) -> Sequence[Scores | ProblemError]:
        """Results of a batch; raises `reward-stalled`."""
        rewards = batch[0].images.rewards
        self._require_none_stalled(rewards)
        progress = _Progress(rewards[0])
        call = self._call = in_thread(partial(self._cancelled.run, self._score_each, batch, progress), THREAD)
        waiter = asyncio.wrap_future(call)
        while not waiter.done():
            reward, since = progress.at
            limit = self._timeout + (self._rewards.max_latency_s(reward) or 0)
            remaining = since + limit - time.monotonic()
            if remaining <= 0:
                self._abandon(reward, call)
                raise reward_stalled([reward], limit)
            await asyncio.wait({waiter}, timeout=remaining)
        return waiter.result()

    def _abandon(self, reward: str, call: "Future[Any]") -> None:
        logger.error("reward %r does not return: its thread is left behind, and the service is not live", reward)
        self._metrics.reward_failed(reward)
        self._abandoned[reward] = call
        self._cancelled.set()

    def _require_none_stalled(self, rewards: Sequence[str]) -> None:
        if stalled := [reward for reward in self.stalled if reward in rewards]:
            raise reward_stalled(stalled)

    def _next_batch(self) -> list[_Waiting]:
        """The oldest request of the next tenant, and the requests after it that fit into its batch, up to the limit."""
        tenant = self._next_tenant()
        first = next(request for request in self._waiting if request.tenant == tenant)
        batch, room = [first], self._batch_limit - len(first.images)
        for request in self._waiting:
            if request is not first and request.images.fits(first.images) and len(request.images) <= room:
                batch.append(request)
                room -= len(request.images)
        for request in batch:
            self._remove(request)
            self._shares.serve(request.tenant, request.images.cost, self._images.keys())
        return batch

    def _next_tenant(self) -> str:
        """A tenant that has just come, or the tenant with the fewest pixels scored."""
        tenants = self._images.keys()
        tenant = self._shares.new_flow(tenants, tenants)
        if tenant is None:
            tenant = self._shares.least_served(tenants, None)
        self._shares.admit(tenant)
        return tenant

    def _remove(self, request: _Waiting) -> None:
        self._waiting.remove(request)
        self._images[request.tenant] -= len(request.images)
        if not self._images[request.tenant]:
            del self._images[request.tenant]

    def _score_each(self, batch: Sequence[_Waiting], progress: _Progress) -> list[Scores | ProblemError]:
        """Score a batch on the thread; if it fails, each request alone, so that one cannot fail another.

        If a reward's server fails, they all wait for it, so that none is sent twice.
        """
        scores = None
        try:
            scores = self._score(Images.join([request.images for request in batch]), progress)
        except Exception as error:
            if len(batch) == 1 or isinstance(error, RewardUnavailableError):
                return [self._problem(error) for _ in batch]
        if scores is None:  # after the handler, because the error's traceback keeps the batch's tensors
            return [result for request in batch for result in self._score_each([request], progress)]
        sizes = [len(request.images) for request in batch]
        split = {name: torch.split(values, sizes) for name, values in scores.items()}
        return [{name: parts[i] for name, parts in split.items()} for i in range(len(batch))]

    def _score(self, images: Images, progress: _Progress) -> Scores:
        """Scores of a batch, in parts where it has too many pixels, or the device's memory runs out."""
        # For this batch alone: other batches have other sizes or rewards, and other users of the memory end.
        limit = AdaptiveBatchSize(max(1, _MOST_PIXELS * len(images) // images.cost), doing="scoring")
        parts = limit.run(len(images), lambda rows: self._score_whole(images.rows(rows), progress))
        return {name: torch.cat([part[name] for part in parts]) for name in images.rewards}

    def _score_whole(self, images: Images, progress: _Progress) -> Scores:
        """Scores of a batch whose pixels are all on the device at once."""
        pixels = as_floats(images.pixels.to(self._device))
        seconds: dict[str, float] = {}
        scores: Scores = {}
        for name in images.rewards:
            progress.begin(name)
            scores |= self._rewards.score([name], pixels, images.prompts, images.metadata, seconds.__setitem__)
        self._metrics.batch_scored(len(images), seconds)
        return scores

    def _problem(self, error: Exception) -> ProblemError:
        if isinstance(error, torch.OutOfMemoryError):
            return ProblemError(
                ProblemKind.OUT_OF_MEMORY,
                "the device's memory cannot fit a single image of this size",
                where="body",
                action="send smaller images, serve fewer rewards, or use a larger device",
            )
        if isinstance(error, RewardError):
            if not current().is_set():
                self._metrics.reward_failed(error.reward)
            return reward_failed(str(error), "body", away=isinstance(error, RewardUnavailableError))
        logger.error("images could not be scored", exc_info=error)
        return ProblemError(internal_error())


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
