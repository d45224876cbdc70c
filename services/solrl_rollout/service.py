"""One service process: settings, store and engine, and what requests ask of them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from solrl_core.fingerprint import fingerprint
from solrl_core.noise import noise_contract
from solrl_proto.models import NoiseContract
from solrl_proto.problems import ProblemKind
from solrl_proto.rollouts import RolloutRequest, Served

from solrl_rollout.engine.adapters import Adapters
from solrl_rollout.engine.admission import check_fitted, check_model, check_precision, check_rewards, check_size
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.rollout import Rollout
from solrl_rollout.engine.work import Hosted, Job
from solrl_rollout.http.access import Caller
from solrl_rollout.http.problems import RetryLaterError
from solrl_rollout.settings import Settings
from solrl_rollout.status import logs
from solrl_rollout.status.curves import Curves
from solrl_rollout.status.metrics import Telemetry
from solrl_rollout.store import AdapterStore, open_store

logger = logging.getLogger(__name__)


class Service:
    """A running service. `draining` is set when it is told to stop: new work is refused from then on."""

    def __init__(
        self,
        settings: Settings,
        store: AdapterStore,
        engine: Engine,
        hosted: Sequence[Hosted],
        telemetry: Telemetry,
    ) -> None:
        self.settings = settings
        self.telemetry = telemetry
        self.store = store
        self.engine = engine
        self.hosted = {model.info.name: model for model in hosted}
        self.noise: NoiseContract = noise_contract()
        self.adapters = Adapters(store)
        self.curves = Curves(store)
        self.started = time.monotonic()
        self.draining = False

    def host(self, model: str) -> Hosted:
        """The hosted model of that name; 404 `model-not-found` if there is none."""
        check_model(model, self.hosted)
        return self.hosted[model]

    def require_accepting(self) -> None:
        """Raises 503 `draining` once the service was told to stop."""
        if self.draining:
            raise RetryLaterError(
                ProblemKind.DRAINING,
                "the service finishes what it has accepted and takes nothing new",
                retry_after=10,
                action="send the same request to another replica, or again after the restart",
            )

    def require_room(self, caller: Caller) -> None:
        """See that anything new of a caller's can be taken, whatever it is.

        Raises:
            ProblemError: 429 `queue-full`, 503.
        """
        self.require_accepting()
        self.engine.require_room(caller.tenant)

    async def accept(self, request: RolloutRequest, caller: Caller) -> Rollout:
        """Check a request and queue its work.

        Raises:
            ProblemError: 404, 422, 429 `queue-full`, 503, as the parts say.
        """
        self.require_accepting()
        hosted = self.host(request.model)
        check_rewards((reward.name for reward in request.rewards), hosted.info)
        check_size(request, hosted.info, self.settings.queue_limit)
        wanted = request.plan.precision
        precision = hosted.default_precision if wanted == "auto" else wanted
        check_precision(precision, hosted.info)
        check_fitted(request.plan.fitted, hosted.info)
        ref = request.adapter
        job = Job(
            tenant=caller.tenant,
            run=ref.run if ref else None,
            model=request.model,
            adapter=await self.adapters.fetch(caller.tenant, ref, hosted) if ref else None,
            precision=precision,
            plan=request.plan,
            rewards=tuple(reward.name for reward in request.rewards),
            images=request.images == "png",
        )
        served = Served(
            model=request.model,
            adapter=ref,
            precision=precision,
            numerics=next(tier.numerics for tier in hosted.info.precisions if tier.precision == precision),
            fingerprint=fingerprint(hosted.info.digests, job.rewards),
            plan=request.plan,
        )
        logs.note(run=job.run, model=job.model)
        head = await self.store.head(caller.tenant, ref.run) if ref else None
        rollout = Rollout(request, job, served, self.engine)
        if ref is not None:
            self.telemetry.served(caller.tenant, ref.run, ref.version, head)
        return rollout


@asynccontextmanager
async def running(settings: Settings, telemetry: Telemetry) -> AsyncIterator[Service]:
    """A service with its store reached and its models loaded and warm; stopped at the end.

    Raises:
        ProblemError: the store cannot be reached.
        ValueError, OSError, RuntimeError: the model or a reward cannot be loaded.
    """
    store = open_store(settings.redis_url, settings.retain, settings.tenant_adapter_bytes)
    engine = Engine(settings, telemetry)
    try:
        await store.ping()
        for warning in await store.warnings():
            logger.warning(warning)
        hosted = await asyncio.wrap_future(engine.start())
        yield Service(settings, store, engine, hosted, telemetry)
    finally:
        await asyncio.to_thread(engine.close)
        await store.close()
