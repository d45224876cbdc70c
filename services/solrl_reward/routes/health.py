"""Liveness and readiness."""

from fastapi import APIRouter
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS

from solrl_reward.routes.common import ServiceDep

router = APIRouter(prefix="/health", tags=["health"], responses=PROBLEMS)


@router.get("/live")
@access("open")
async def live(service: ServiceDep) -> dict[str, str]:
    """200 while all rewards return in time; 503 if one does not: restart the process, which serves others meanwhile.

    The process ends by itself if it can score nothing more.
    """
    service.require_live()
    return {"status": "live"}


@router.get("/ready")
@access("open")
async def ready(service: ServiceDep) -> dict[str, str | list[str]]:
    """200 while new work is accepted, with the rewards that can be computed."""
    return {"status": "ready", "rewards": list(service.ready)}
