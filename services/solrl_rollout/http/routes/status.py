"""Progress of runs: trainers report it, the status page shows it."""

import base64
import io
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from PIL import Image
from pydantic import ValidationError
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS, CallerDep, compressed
from solrl_proto.identifiers import Message, RunName
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.status import THUMBNAIL_SIDE, Activity, IterationReport, RunDetail, Samples, StatusAnswer

from solrl_rollout.http import board
from solrl_rollout.http.routes.common import ServiceDep
from solrl_rollout.status.curves import detail, evaluations, settings
from solrl_rollout.store.errors import RunNotFoundError

router = APIRouter(prefix="/v1", tags=["status"], responses=PROBLEMS)

Body = TypeVar("Body", bound=Message)

_MOST_PER_PAGE = 1000


def _body_of(model: type[Message]) -> dict[str, Any]:
    """The documentation of a body that the route reads itself: FastAPI would read it before the check of the run."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read(request: Request, service: ServiceDep, caller: CallerDep, run: str, model: type[Body]) -> Body:
    """The body of a report about one of the caller's runs.

    Raises:
        RunNotFoundError: the caller has no such run.
        RequestValidationError: the body is no such report.
    """
    if await service.store.head(caller.tenant, run) is None:
        raise RunNotFoundError(run)
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error


@router.get("/status", response_model=StatusAnswer)
@access("token")
async def get_status(
    request: Request, service: ServiceDep, caller: CallerDep, since: Annotated[int, Query(ge=0, lt=2**53)] = 0
) -> Response:
    """Runs and their curves, queue and throughput of the caller's tenant; `since`: only curves that changed later."""
    return _answer(request, await board.status(service, caller.tenant, since))


@router.get("/runs/{run}/iterations", response_model=RunDetail)
@access("token")
async def get_iterations(
    request: Request,
    service: ServiceDep,
    caller: CallerDep,
    run: RunName,
    after: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
    limit: Annotated[int | None, Query(ge=1, le=_MOST_PER_PAGE)] = None,
) -> Response:
    """Curves of a run's iterations and held-out evaluations, thinned for display, its settings and newest samples.

    `after`: the curve has only iterations after this one. `limit`: it has the oldest of them, at most this many, and
    nothing is thinned. All else describes the whole run.
    """
    points = await service.store.iterations(caller.tenant, run)
    run_detail = RunDetail(
        run=run,
        curve=detail(points, after, limit),
        held_out=evaluations(points) if limit is None else evaluations(points, None),
        settings=settings(points),
        samples=await service.store.samples(caller.tenant, run),
    )
    return _answer(request, run_detail)


@router.post("/runs/{run}/iterations", status_code=204, openapi_extra=_body_of(IterationReport))
@access("push")
async def add_iteration(request: Request, service: ServiceDep, caller: CallerDep, run: RunName) -> None:
    """Report an iteration. A repeated report replaces it and all later ones."""
    body = await _read(request, service, caller, run, IterationReport)
    if body.samples is not None:
        check_thumbnails(body.samples)
    await service.store.add_iteration(caller.tenant, run, body)


@router.put("/runs/{run}/activity", status_code=204, openapi_extra=_body_of(Activity))
@access("push")
async def set_activity(request: Request, service: ServiceDep, caller: CallerDep, run: RunName) -> None:
    """Report progress within an iteration. It is shown for a minute."""
    body = await _read(request, service, caller, run, Activity)
    await service.store.set_activity(caller.tenant, run, body)


def _answer(request: Request, message: Message) -> Response:
    # Never cached: another token may not be allowed to see it.
    body = message.model_dump_json().encode()
    return compressed(request, body, "application/json", {"Cache-Control": "no-store"})


def check_thumbnails(samples: Samples) -> None:
    """Refuse samples unless every thumbnail is a small image: browsers decode whatever they are sent.

    Raises:
        ProblemError: 422 `thumbnail`.
    """
    for i, pair in enumerate(samples.pairs):
        for name in ("explored", "regenerated"):
            fault = _fault(getattr(pair, name))
            if fault is not None:
                raise ProblemError(
                    ProblemKind.THUMBNAIL,
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
