"""The data of the status page: one tenant's runs, its part of the queue, and its throughput."""

import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version

from solrl_proto.adapters import AdapterList
from solrl_proto.status import (
    Activity,
    Curve,
    HeldOut,
    HostedStatus,
    QueueStatus,
    RunStatus,
    ServiceStatus,
    StatusAnswer,
    Waiting,
)

from solrl_rollout.engine.work import Chunk
from solrl_rollout.service import Service
from solrl_rollout.store.errors import CorruptError, RunNotFoundError
from solrl_rollout.store.run_store import Progress


async def status(service: Service, tenant: str, since: int) -> StatusAnswer:
    """The tenant's view of the service, with curves only for runs that reported after revision `since`."""
    runs = (await service.store.runs(tenant)).runs
    progress = await service.store.progress(tenant, [run.run for run in runs])
    activities = await service.store.activities(tenant, [run.run for run in runs])
    statuses = [await _run(service, tenant, run, progress.get(run.run), activities.get(run.run), since) for run in runs]
    waiting, busy = service.engine.waiting(tenant)
    return StatusAnswer(
        service=_service(service, tenant),
        queue=_queue(service, waiting),
        throughput=service.engine.scheduler.throughput.of_tenant(tenant, busy=busy),
        runs=tuple(statuses),
        revision=max((one.revision for one in progress.values()), default=0),
    )


async def _run(
    service: Service,
    tenant: str,
    adapters: AdapterList,
    progress: Progress | None,
    activity: Activity | None,
    since: int,
) -> RunStatus:
    curve: Curve | None = None
    held_out: tuple[HeldOut, ...] = ()
    if progress is not None and progress.revision > since:
        with suppress(RunNotFoundError, CorruptError):  # deleted since, or damaged
            curve, held_out = await service.curves.overview(tenant, adapters.run, progress.revision)
    return RunStatus(
        run=adapters.run,
        model=adapters.versions[-1].model,
        head=adapters.head,
        versions=len(adapters.versions),
        pinned=len(adapters.pinned),
        size=sum(info.size for info in adapters.versions),
        revision=progress.revision if progress else None,
        age=None if progress is None else round(max(0.0, time.time() - progress.revision / 1e6), 1),
        last=progress.last.model_copy(update={"settings": None}) if progress else None,
        curve=curve,
        activity=activity,
        held_out=held_out,
    )


def _queue(service: Service, chunks: Sequence[Chunk]) -> QueueStatus:
    now = time.monotonic()
    waiting: dict[str | None, tuple[int, float]] = {}
    for chunk in chunks:
        candidates, since = waiting.get(chunk.job.run, (0, chunk.queued_at))
        waiting[chunk.job.run] = candidates + chunk.candidates, min(since, chunk.queued_at)
    ordered = sorted(waiting.items(), key=lambda item: item[1][1])
    runs = tuple(Waiting(run=run, candidates=n, age=round(now - since, 2)) for run, (n, since) in ordered)
    return QueueStatus(
        candidates=sum(one.candidates for one in runs),
        limit=service.settings.most_queued,
        oldest=max((one.age for one in runs), default=0.0),
        runs=runs,
    )


def _service(service: Service, tenant: str) -> ServiceStatus:
    return ServiceStatus(
        version=version("solrl"),
        tenant=tenant,
        uptime=round(time.monotonic() - service.started_at, 1),
        draining=service.draining,
        store="redis" if service.settings.store_url not in (None, "memory://") else "memory",
        models=tuple(
            HostedStatus(
                **hosted.info.model_dump(include=set(HostedStatus.model_fields)),
                default_precision=hosted.default_precision,
                at_once=hosted.batch_limits(),
            )
            for hosted in service.hosted.values()
        ),
        workers=service.engine.workers,
    )
