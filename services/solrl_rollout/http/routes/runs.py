"""Runs: what there is, and the end of one."""

from fastapi import APIRouter
from solrl_proto.adapters import RunList
from solrl_proto.identifiers import RunName

from solrl_rollout.http.routes.common import PROBLEMS, CallerDep, ServiceDep

router = APIRouter(prefix="/v1/runs", tags=["adapters"], responses=PROBLEMS)


@router.get("")
async def list_runs(service: ServiceDep, caller: CallerDep) -> RunList:
    """All runs whose adapters are stored, and what they take."""
    return await service.store.runs(caller.tenant)


@router.delete("/{run}", status_code=204)
async def delete_run(service: ServiceDep, caller: CallerDep, run: RunName) -> None:
    """Delete a run's adapters. Work that was accepted under them is finished."""
    await service.store.delete(caller.tenant, run)
    service.telemetry.deleted(caller.tenant, run)
