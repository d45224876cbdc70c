"""One service process: settings, store and engine, and the rollouts that requests ask of them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from solrl_core.noise import noise_contract
from solrl_proto.models import NoiseContract
from solrl_proto.rollouts import RolloutAnswer, RolloutRequest, RolloutTimings

from solrl_rollout.adapters import Adapters
from solrl_rollout.engine import Engine
from solrl_rollout.groups import Group
from solrl_rollout.problems import RetryLaterError
from solrl_rollout.refusals import check_model, check_precision, check_rewards, check_size
from solrl_rollout.settings import Settings
from solrl_rollout.store import AdapterStore, open_store
from solrl_rollout.work import Chunk, Hosted, Job, Scored, split


class Service:
    """A running service. `draining` is set when it is told to stop: new work is refused from then on."""

    def __init__(self, settings: Settings, store: AdapterStore, engine: Engine, hosted: Hosted) -> None:
        self.settings = settings
        self.store = store
        self.engine = engine
        self.hosted = hosted.info
        self.default_precision = hosted.default_precision
        self.device = hosted.device
        self.noise: NoiseContract = noise_contract()
        self.adapters = Adapters(store, hosted)
        self.draining = False

    def require_accepting(self) -> None:
        """Raises 503 `draining` once the service was told to stop."""
        if self.draining:
            raise RetryLaterError(
                "draining",
                503,
                "Service is stopping",
                "the service finishes what it has accepted and takes nothing new",
                retry_after=10,
                action="send the same request to another replica, or again after the restart",
            )

    async def rollout(self, request: RolloutRequest) -> RolloutAnswer:
        """Make and score a request's candidates.

        Raises:
            ProblemError: 404, 422, 429 `queue-full`, 500, 503, as the parts say.
        """
        self.require_accepting()
        check_model(request.model, self.hosted)
        check_rewards((reward.name for reward in request.rewards), self.hosted)
        check_size(request, self.hosted, self.settings.queue_limit)
        wanted = request.plan.precision
        precision = self.default_precision if wanted == "auto" else wanted
        check_precision(precision, self.hosted)
        job = Job(
            run=request.adapter.run if request.adapter else None,
            adapter=await self.adapters.fetch(request.adapter) if request.adapter else None,
            precision=precision,
            plan=request.plan,
            rewards=tuple(reward.name for reward in request.rewards),
            images=request.images == "png",
        )
        asked = time.monotonic()
        try:
            split_up = split(request, job)
            finished = await self._run(split_up)
            groups = [Group(request, part, done, done) for part, done in zip(split_up, finished, strict=True)]
            if request.plan.prune is not None:
                groups = await self._prune(groups, request.plan.prune.keep)
        finally:
            # Nothing is left to cancel unless a chunk failed or the client went away.
            self.engine.cancel(job)
        return await asyncio.to_thread(self._answer, request, job, groups, asked)

    async def _run(self, groups: list[list[Chunk]], *, admitted: bool = False) -> list[list[Scored]]:
        """Every group's chunks, finished."""
        chunks = [chunk for group in groups for chunk in group]
        self.engine.submit(chunks, admitted=admitted)
        done = iter(await asyncio.gather(*(asyncio.wrap_future(chunk.done) for chunk in chunks)))
        return [[next(done) for _ in group] for group in groups]

    async def _prune(self, groups: list[Group], keep: int) -> list[Group]:
        """Groups that stand halfway, with the most extreme candidates taken to the end."""
        chosen = [group.survivors(keep) for group in groups]
        ends = await self._run([chunks for _, chunks in chosen], admitted=True)
        return [group.pruned(places, done) for group, (places, _), done in zip(groups, chosen, ends, strict=True)]

    def _answer(self, request: RolloutRequest, job: Job, groups: list[Group], asked: float) -> RolloutAnswer:
        scored = [one for group in groups for one in group.scored]
        return RolloutAnswer(
            model=self.hosted.name,
            adapter=request.adapter,
            precision=job.precision,
            numerics=next(p.numerics for p in self.hosted.precisions if p.precision == job.precision),
            plan=request.plan,
            groups=tuple(group.answer() for group in groups),
            seconds=RolloutTimings(
                queued=min(one.started for one in scored) - asked,
                generate=sum(one.generate for one in scored),
                reward=sum(one.reward for one in scored),
            ),
        )


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Service]:
    """A service with its store reached and its model loaded, scored and warm; stopped at the end.

    Raises:
        ProblemError: the store cannot be reached.
        ValueError, OSError, RuntimeError: the model or a reward cannot be loaded.
    """
    store = open_store(settings.redis_url, settings.retain)
    engine = Engine(settings)
    try:
        await store.ping()
        hosted = await asyncio.wrap_future(engine.start())
        yield Service(settings, store, engine, hosted)
    finally:
        await asyncio.to_thread(engine.close)
        await store.close()
