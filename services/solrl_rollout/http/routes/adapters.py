"""Runs: list, delete; and their adapter versions: push, read, rewind."""

import base64
import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS, CallerDep
from solrl_proto.adapters import (
    ADAPTER_MEDIA_TYPE,
    DIGEST_HEADER,
    AdapterInfo,
    AdapterList,
    RunList,
)
from solrl_proto.identifiers import ModelName, RunName, Version
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_rollout.http.routes import ServiceDep

router = APIRouter(prefix="/v1/runs", tags=["adapters"], responses=PROBLEMS)

_SHA256 = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?=$|,|;)")
_BINARY: dict[str, Any] = {ADAPTER_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}


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


@router.put(
    "/{run}/adapters/{version}",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": _BINARY}},
    responses={200: {"model": AdapterInfo, "description": "Stored already, with the same content"}},
)
@access("push", body_limit_setting="max_adapter_bytes")
async def put_adapter(
    request: Request,
    response: Response,
    service: ServiceDep,
    caller: CallerDep,
    run: RunName,
    version: Version,
    model: ModelName,
    digest: Annotated[str, Header(alias=DIGEST_HEADER, description="RFC 9530: `sha-256=:<base64>:`")],
    parent: Version | None = None,
) -> AdapterInfo:
    """Store an adapter version (safetensors, PEFT keys, float32) and make it the run's head."""
    service.require_accepting()
    hosted = service.find_model(model)
    announced = _parse_digest(digest)
    body = await request.body()
    info, new = await service.adapters.push(caller.tenant, run, version, parent, announced, body, hosted)
    if new:
        service.metrics.adapter_pushed(caller.tenant, run, version, info.size)
    response.status_code = 201 if new else 200
    return info


@router.get("/{run}/adapters")
@access("token")
async def list_adapters(service: ServiceDep, caller: CallerDep, run: RunName) -> AdapterList:
    """All stored versions of a run, oldest first."""
    return await service.store.list(caller.tenant, run)


@router.delete("/{run}/adapters", status_code=204)
@access("push")
async def rewind_run(
    service: ServiceDep,
    caller: CallerDep,
    run: RunName,
    after: Version,
    head: Version,
) -> None:
    """Delete the versions after `after` up to `head`. Work already accepted under them is finished."""
    await service.store.rewind(caller.tenant, run, after, head)
    service.metrics.run_rewound(caller.tenant, run, after)


@router.get("/{run}/adapters/{version}")
@access("token")
async def get_adapter(service: ServiceDep, caller: CallerDep, run: RunName, version: Version) -> AdapterInfo:
    """Description of a version."""
    return await service.store.info(caller.tenant, run, version)


@router.get("/{run}/adapters/{version}/weights", response_class=Response, responses={200: {"content": _BINARY}})
@access("token")
async def get_weights(service: ServiceDep, caller: CallerDep, run: RunName, version: Version) -> Response:
    """Bytes of a version as pushed, with their Content-Digest."""
    info, body = await service.store.get(caller.tenant, run, version)
    packed = base64.b64encode(bytes.fromhex(info.digest.removeprefix("sha256:"))).decode()
    return Response(body, media_type=ADAPTER_MEDIA_TYPE, headers={DIGEST_HEADER: f"sha-256=:{packed}:"})


def _parse_digest(header: str) -> str:
    """`sha256:<hex>` from a Content-Digest header, which may list other algorithms, too."""
    if match := _SHA256.search(header):
        return f"sha256:{base64.b64decode(match[1]).hex()}"
    raise ProblemError(
        ProblemKind.DIGEST_HEADER,
        "the header has no sha-256 digest",
        where=f"header.{DIGEST_HEADER}",
        got=header[:200],
        expected="sha-256=:<base64 of 32 bytes>:",
        action="send the SHA-256 of the body in the format of RFC 9530",
    )
