"""Liveness of the engine and readiness of the service."""

import asyncio

from fastapi import APIRouter
from solrl_http import logs
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_rollout.http.routes import ServiceDep
from solrl_rollout.service import Service
from solrl_rollout.store.errors import StoreUnavailableError

router = APIRouter(prefix="/health", tags=["health"], responses=PROBLEMS)


@router.get("/live")
@access("open")
async def live(service: ServiceDep) -> dict[str, str]:
    """200 while all serving workers answer; 503 when the engine is dead, or while one of them is stuck."""
    await _ping_engine(service)
    return {"status": "live"}


@router.get("/ready")
@access("open")
async def ready(service: ServiceDep) -> dict[str, str | int]:
    """200 while the models are loaded, a worker and the store answer, and new work is accepted; names no model."""
    service.require_accepting()
    await _ping_engine(service)
    try:
        await service.store.ping()
    except StoreUnavailableError as error:
        logs.add_fields(store=error.address, fault=error.fault)  # not for everybody who can reach an open route
        raise ProblemError(
            ProblemKind.STORE_UNAVAILABLE,
            "the store of adapters does not answer",
            action="the service's log has its address and its answer",
        ) from None
    workers = service.engine.workers
    serving = sum(worker.serving for worker in workers)
    if not serving:
        raise ProblemError(
            ProblemKind.ENGINE_STALLED,
            f"none of the {len(workers)} workers is serving; all are being restarted",
            retry_after=10,
            action="wait; the service's log has the reason",
        )
    return {"status": "ready", "workers": len(workers), "serving": serving}


async def _ping_engine(service: Service) -> None:
    limit = service.settings.live_timeout
    try:
        await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, service.engine.ping())), limit)
    except TimeoutError:
        raise ProblemError(
            ProblemKind.ENGINE_STALLED,
            f"a worker did not answer within {limit} seconds",
            action="wait: one of several workers is replaced after twice that time; if this persists, restart the "
            "service, or raise live_timeout if its steps take longer",
        ) from None
