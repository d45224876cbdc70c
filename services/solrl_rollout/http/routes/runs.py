"""Listing and deleting runs."""

from fastapi import APIRouter
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS, CallerDep
from solrl_proto.adapters import RunList
from solrl_proto.identifiers import RunName

from solrl_rollout.http.routes.common import ServiceDep

router = APIRouter(prefix="/v1/runs", tags=["adapters"], responses=PROBLEMS)


@router.get("")
@access("token")
async def list_runs(service: ServiceDep, caller: CallerDep) -> RunList:
    """All runs with stored adapters, and their size in bytes."""
    return await service.store.runs(caller.tenant)


@router.delete("/{run}", status_code=204)
@access("push")
async def delete_run(service: ServiceDep, caller: CallerDep, run: RunName) -> None:
    """Delete a run's adapters. Work already accepted under them is finished."""
    await service.store.delete(caller.tenant, run)
    service.metrics.run_deleted(caller.tenant, run)
