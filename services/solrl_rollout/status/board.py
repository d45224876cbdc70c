"""What one tenant may see of the service: its runs, its part of the queue, what was made for it."""

import time
from collections.abc import Sequence
from importlib.metadata import version

from solrl_proto.adapters import AdapterList
from solrl_proto.problems import ProblemError
from solrl_proto.status import (
    Curve,
    HostedStatus,
    QueueStatus,
    RunStatus,
    ServiceStatus,
    StatusAnswer,
    Waiting,
)

from solrl_rollout.engine.work import Chunk
from solrl_rollout.service import Service
from solrl_rollout.store.base import Progress


async def status(service: Service, tenant: str, since: int) -> StatusAnswer:
    """All of it; curves only of runs that told something after revision `since`."""
    listed = (await service.store.runs(tenant)).runs
    progress = await service.store.progress(tenant, [held.run for held in listed])
    runs = [await _run(service, tenant, held, progress.get(held.run), since) for held in listed]
    waiting, busy = service.engine.waiting(tenant)
    return StatusAnswer(
        service=_service(service, tenant),
        queue=_queue(service, waiting),
        throughput=service.engine.recent.of(tenant, busy=busy),
        runs=tuple(runs),
        revision=max((one.revision for one in progress.values()), default=0),
    )


async def _run(service: Service, tenant: str, held: AdapterList, at: Progress | None, since: int) -> RunStatus:
    curve: Curve | None = None
    if at is not None and at.revision > since:
        try:
            curve = await service.curves.overview(tenant, held.run, at.revision)
        except ProblemError as error:
            if error.problem.status != 404:  # deleted meanwhile
                raise
    return RunStatus(
        run=held.run,
        model=held.versions[-1].model,
        head=held.head,
        versions=len(held.versions),
        pinned=len(held.pinned),
        size=sum(info.size for info in held.versions),
        revision=at.revision if at else None,
        age=None if at is None else round(max(0.0, time.time() - at.revision / 1e6), 1),
        last=at.last if at else None,
        curve=curve,
    )


def _queue(service: Service, chunks: Sequence[Chunk]) -> QueueStatus:
    now = time.monotonic()
    waiting: dict[str | None, tuple[int, float]] = {}
    for chunk in chunks:
        candidates, since = waiting.get(chunk.job.run, (0, chunk.queued))
        waiting[chunk.job.run] = candidates + chunk.candidates, min(since, chunk.queued)
    ordered = sorted(waiting.items(), key=lambda item: item[1][1])
    runs = tuple(Waiting(run=run, candidates=n, age=round(now - since, 2)) for run, (n, since) in ordered)
    settings = service.settings
    return QueueStatus(
        candidates=sum(one.candidates for one in runs),
        limit=min(settings.queue_limit, settings.tenant_queue_limit or settings.queue_limit),
        oldest=max((one.age for one in runs), default=0.0),
        runs=runs,
    )


def _service(service: Service, tenant: str) -> ServiceStatus:
    return ServiceStatus(
        version=version("solrl"),
        tenant=tenant,
        uptime=round(time.monotonic() - service.started, 1),
        draining=service.draining,
        store="redis" if service.settings.redis_url not in (None, "memory://") else "memory",
        models=tuple(
            HostedStatus(
                name=hosted.info.name,
                family=hosted.info.family,
                width=hosted.info.width,
                height=hosted.info.height,
                default_precision=hosted.default_precision,
                precisions=hosted.info.precisions,
                at_once=dict(hosted.at_once),
            )
            for hosted in service.hosted.values()
        ),
    )
