"""One service process: its store and engine, and the operations behind the routes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from solrl_core.fingerprint import fingerprint
from solrl_core.sampling.noise import noise_contract
from solrl_http import logs
from solrl_http.serving import ServiceState
from solrl_proto.models import NoiseContract
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import RolloutRequest, Served

from solrl_rollout.admission import (
    answer_bytes,
    check_prompts,
    check_request,
    external_rewards_of,
)
from solrl_rollout.engine.adapters import AdapterMemory, Adapters
from solrl_rollout.engine.backends import BackendLoader
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.external_rewards import digests_with
from solrl_rollout.engine.rollout import RolloutHandle
from solrl_rollout.engine.work import HostedModel, Job, release
from solrl_rollout.engine.workers import make_workers
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.curves import OverviewCurves
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from solrl_rollout.store import RunStore, open_store


class Service(ServiceState):
    """A running service: its hosted models, engine, store and adapters."""

    def __init__(
        self,
        settings: RolloutSettings,
        store: RunStore,
        engine: Engine,
        hosted: Sequence[HostedModel],
        metrics: RolloutMetrics,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.store = store
        self.engine = engine
        self.hosted = {model.info.name: model for model in hosted}
        self.noise: NoiseContract = noise_contract()
        self.adapters = Adapters(
            store, AdapterMemory(settings.max_queued_adapter_bytes, settings.tenant_queued_adapter_bytes)
        )
        metrics.watch_store(store.sizes, settings.tenant_adapter_bytes)
        self.curves = OverviewCurves(store)
        self.started_at = time.monotonic()

    @property
    def dead(self) -> bool:
        """Whether the engine ended; only a new process can replace it."""
        return self.engine.scheduler.dead

    def find_model(self, name: str) -> HostedModel:
        """The hosted model called `name`; raises 404 `model-not-found` if there is none."""
        if name not in self.hosted:
            raise ProblemError(
                ProblemKind.MODEL_NOT_FOUND,
                f"this service does not host {name!r}",
                where="model",
                got=name,
                expected=sorted(self.hosted),
                action="use a hosted model, or start a service for this one",
            )
        return self.hosted[name]

    def require_capacity(self, tenant: str) -> None:
        """Check that a tenant's request for at least one candidate could be accepted.

        Raises:
            ProblemError: 429 `queue-full`, 503.
        """
        self.require_accepting()
        self.engine.scheduler.require_capacity(tenant)

    async def accept(self, request: RolloutRequest, tenant: str, reserve: Callable[[int], None]) -> RolloutHandle:
        """Check a request and queue its work.

        Args:
            reserve: called with the bytes that the answer's images may take in memory; it may raise.

        Raises:
            ProblemError: 404 or 422: the service does not serve such requests, or lacks the adapter version. 429, 503:
                it has no room for the work or its answer, or it began to stop.
        """
        self.require_accepting()
        hosted = self.find_model(request.model)
        precision = check_request(request, hosted, self.settings.most_queued, self.settings.tenant_inflight_bytes)
        external_rewards = external_rewards_of(request.rewards, self.settings.reward_hosts)
        await asyncio.to_thread(check_prompts, request, hosted)
        reserve(answer_bytes(request, hosted.info))
        ref = request.adapter
        info = next(info for info in hosted.info.precisions if info.precision == precision)
        rewards = tuple(reward.name for reward in request.rewards)
        served = Served(
            model=request.model,
            adapter=ref,
            precision=precision,
            numerics=info.numerics,
            fingerprint=fingerprint(digests_with(hosted.info.digests, external_rewards), rewards),
            plan=request.plan,
        )
        logs.add_fields(run=ref.run if ref else None, model=request.model)
        adapter = await self.adapters.fetch(tenant, ref, hosted) if ref else None
        try:
            head = await self.store.head(tenant, ref.run) if ref else None
            job = Job(
                tenant=tenant,
                run=ref.run if ref else None,
                model=request.model,
                adapter=adapter,
                precision=precision,
                plan=request.plan,
                rewards=rewards,
                images=request.images != "none",
                external_rewards=external_rewards,
            )
            rollout = RolloutHandle(request, job, served, self.engine)
        except BaseException:
            release(adapter)
            raise
        if ref is not None:
            self.metrics.adapter_served(tenant, ref.run, ref.version, head)
        return rollout


@asynccontextmanager
async def running_service(
    settings: RolloutSettings, metrics: RolloutMetrics, load_backend: BackendLoader
) -> AsyncIterator[Service]:
    """A service whose store answers and whose models are loaded and warm; stopped at the end.

    Raises:
        StoreUnavailableError: the store cannot be reached.
        ValueError, OSError, RuntimeError: the store's URL cannot be used, or the model or a reward cannot be loaded.
    """
    store = open_store(settings.store_url, settings.retain, settings.tenant_adapter_bytes)
    engine = Engine(settings, metrics, make_workers(settings, metrics, load_backend))
    try:
        await store.ping()
        hosted = await asyncio.wrap_future(engine.start())
        yield Service(settings, store, engine, hosted, metrics)
    finally:
        await asyncio.to_thread(engine.close)
        await store.close()
