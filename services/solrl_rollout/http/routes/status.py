"""Progress of runs: trainers report it, the status page shows it."""

import base64
import binascii
import gzip
import io
import struct
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS, CallerDep, accepts_gzip
from solrl_proto.identifiers import Message, RunName
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.status import THUMBNAIL_SIDE, Activity, IterationReport, RunDetail, Samples, StatusAnswer

from solrl_rollout.http import board
from solrl_rollout.http.routes.common import ServiceDep
from solrl_rollout.status.curves import detail, evaluations, settings
from solrl_rollout.store.errors import RunNotFoundError

router = APIRouter(prefix="/v1", tags=["status"], responses=PROBLEMS)

Body = TypeVar("Body", bound=Message)

_COMPRESS_FROM = 1024  # bytes
_MOST_PER_PAGE = 1000


def _body_of(model: type[Message]) -> dict[str, Any]:
    """The documentation of a body that the route reads itself: FastAPI would read it before the check of the run."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read(request: Request, service: ServiceDep, caller: CallerDep, run: str, model: type[Body]) -> Body:
    """The body of a report about one of the caller's runs.

    Raises:
        RunNotFoundError.
        RequestValidationError: another body.
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
    return compressed(request, await board.status(service, caller.tenant, since))


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
    found = RunDetail(
        run=run,
        curve=detail(points, after, limit),
        held_out=evaluations(points) if limit is None else evaluations(points, None),
        settings=settings(points),
        samples=await service.store.samples(caller.tenant, run),
    )
    return compressed(request, found)


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


def compressed(request: Request, answer: Message) -> Response:
    """The answer as JSON, compressed if the client accepts it."""
    body = answer.model_dump_json().encode()
    # Never cached: another token may not be allowed to see it.
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if len(body) >= _COMPRESS_FROM and accepts_gzip(request):
        body, headers["Content-Encoding"] = gzip.compress(body, 5), "gzip"
    return Response(body, media_type="application/json", headers=headers)


_UNSIGNED_24 = (1 << 24) - 1


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
        data = base64.b64decode(text, validate=True)
        # Before Pillow opens it: decoders allocate memory by the header, gigabytes for an image of 60,000² pixels.
        if max(size := _header_size(data)) > THUMBNAIL_SIDE:
            return size
        with Image.open(io.BytesIO(data), formats=("WEBP", "PNG")) as image:
            return image.size if max(image.size) > THUMBNAIL_SIDE else None
    except (binascii.Error, UnidentifiedImageError, OSError, ValueError, SyntaxError, struct.error) as error:
        return type(error).__name__


def _header_size(data: bytes) -> tuple[int, int]:
    """Width and height from the header of a PNG or a WebP; (0, 0) for anything else.

    Sources: PNG specification 11.2.2 (IHDR); RFC 9649 sections 2.5 to 2.7 (VP8, VP8L and VP8X headers).
    """
    if data.startswith(b"\x89PNG"):
        width, height = struct.unpack_from(">II", data, 16)
        return width, height
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = data[12:16]
        if kind == b"VP8X":
            (width,), (height,) = struct.unpack_from("<I", data, 24), struct.unpack_from("<I", data, 27)
            return (width & _UNSIGNED_24) + 1, (height & _UNSIGNED_24) + 1
        if kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0
