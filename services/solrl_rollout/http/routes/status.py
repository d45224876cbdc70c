"""Progress of runs: trainers report it, the status page shows it."""

import base64
import io
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from PIL import Image
from pydantic import ValidationError
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS, CallerDep, compressed
from solrl_proto.adapters import AdapterList
from solrl_proto.identifiers import Message, RunName
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.status import (
    THUMBNAIL_SIDE,
    Curve,
    HeldOut,
    HostedStatus,
    IterationReport,
    QueueStatus,
    RunDetail,
    RunStatus,
    Samples,
    ServiceStatus,
    StatusAnswer,
    Waiting,
)

from solrl_rollout.engine.work import Chunk
from solrl_rollout.http.routes import ServiceDep
from solrl_rollout.service import Service
from solrl_rollout.status.curves import detail, evaluations, settings
from solrl_rollout.store.errors import CorruptError, RunNotFoundError
from solrl_rollout.store.run_store import Progress

router = APIRouter(prefix="/v1", tags=["status"], responses=PROBLEMS)

_SCHEMA = {"$ref": "#/components/schemas/IterationReport"}
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}
"""Documentation of a body that the route reads itself: FastAPI would read it before the check of the run."""


async def _run(
    service: Service,
    tenant: str,
    adapters: AdapterList,
    progress: Progress | None,
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
        size=sum(info.size for info in adapters.versions),
        revision=progress.revision if progress else None,
        age=None if progress is None else round(max(0.0, time.time() - progress.revision / 1e6), 1),
        last=progress.last.model_copy(update={"settings": None}) if progress else None,
        curve=curve,
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
        candidates=sum(run.candidates for run in runs),
        limit=service.settings.most_queued,
        oldest=max((run.age for run in runs), default=0.0),
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
            )
            for hosted in service.hosted.values()
        ),
        workers=service.engine.workers,
    )


@router.get("/status", response_model=StatusAnswer)
@access("token")
async def get_status(
    request: Request, service: ServiceDep, caller: CallerDep, since: Annotated[int, Query(ge=0, lt=2**53)] = 0
) -> Response:
    """Runs and their curves, queue and throughput of the caller's tenant; `since`: only curves that changed later."""
    tenant = caller.tenant
    runs = (await service.store.runs(tenant)).runs
    progress = await service.store.progress(tenant, [run.run for run in runs])
    statuses = [await _run(service, tenant, run, progress.get(run.run), since) for run in runs]
    waiting, busy = service.engine.waiting(tenant)
    answer = StatusAnswer(
        service=_service(service, tenant),
        queue=_queue(service, waiting),
        throughput=service.engine.scheduler.throughput.of_tenant(tenant, busy=busy),
        runs=tuple(statuses),
        revision=max((iteration.revision for iteration in progress.values()), default=0),
    )
    return _answer(request, answer)


@router.get("/runs/{run}/iterations", response_model=RunDetail)
@access("token")
async def get_iterations(
    request: Request,
    service: ServiceDep,
    caller: CallerDep,
    run: RunName,
) -> Response:
    """Curves of a run's iterations and held-out evaluations, thinned for display, its settings and newest samples."""
    points = await service.store.iterations(caller.tenant, run)
    run_detail = RunDetail(
        run=run,
        curve=detail(points),
        held_out=evaluations(points),
        settings=settings(points),
        samples=await service.store.samples(caller.tenant, run),
    )
    return _answer(request, run_detail)


@router.post("/runs/{run}/iterations", status_code=204, openapi_extra=_BODY)
@access("push")
async def add_iteration(request: Request, service: ServiceDep, caller: CallerDep, run: RunName) -> None:
    """Report an iteration. A repeated report replaces it and all later ones."""
    if await service.store.head(caller.tenant, run) is None:
        raise RunNotFoundError(run)
    try:
        body = IterationReport.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError([fault | {"loc": ("body", *fault["loc"])} for fault in error.errors()]) from error
    if body.samples is not None:
        check_thumbnails(body.samples)
    await service.store.add_iteration(caller.tenant, run, body)
    planned = body.planned is not None and body.iteration + 1 >= body.planned
    service.metrics.run_reported(caller.tenant, run, ended=planned or body.ended is not None)


def _answer(request: Request, message: Message) -> Response:
    # Never cached: another token may not be allowed to see it.
    body = message.model_dump_json().encode()
    return compressed(request, body, "application/json", {"Cache-Control": "no-store"})


def check_thumbnails(samples: Samples) -> None:
    """Refuse samples unless every thumbnail is a small image: browsers decode whatever they are sent.

    Raises:
        ProblemError: 422 `invalid-request`.
    """
    for i, pair in enumerate(samples.pairs):
        for name in ("explored", "regenerated"):
            fault = _fault(getattr(pair, name))
            if fault is not None:
                raise ProblemError(
                    ProblemKind.INVALID_REQUEST,
                    "a thumbnail is not a small image",
                    where=f"body.samples.pairs.{i}.{name}",
                    got=fault,
                    expected=f"a WebP or PNG of at most {THUMBNAIL_SIDE} pixels a side",
                    action="shrink it, or omit the samples",
                )


def _fault(text: str) -> object:
    """The size of an image that is too large, the error's name for anything but an image, or None if it is fine."""
    try:
        # Opened, not decoded: of a huge image, Pillow allocates addresses alone.
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=("WEBP", "PNG")) as image:
            return image.size if max(image.size) > THUMBNAIL_SIDE else None
    except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError) as error:
        return type(error).__name__
