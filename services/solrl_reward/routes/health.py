"""Liveness and readiness."""

from fastapi import APIRouter
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS

from solrl_reward.routes.common import ServiceDep

router = APIRouter(prefix="/health", tags=["health"], responses=PROBLEMS)


@router.get("/live")
@access("open")
async def live(service: ServiceDep) -> dict[str, str]:
    """200 while the process answers; it ends by itself if it can score nothing more."""
    return {"status": "live"}


@router.get("/ready")
@access("open")
async def ready(service: ServiceDep) -> dict[str, str | list[str]]:
    """200 while the rewards are loaded and new work is accepted."""
    service.require_accepting()
    return {"status": "ready", "rewards": list(service.rewards.names)}
