"""What every route needs: the running service, and how its problems are documented."""

from typing import Annotated, Any

from fastapi import Depends, Request
from solrl_proto.problems import PROBLEM_MEDIA_TYPE

from solrl_rollout.access import Caller
from solrl_rollout.service import Service

PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem document (RFC 9457)",
        "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller  # set by access control; a route that is open has none
    return caller


ServiceDep = Annotated[Service, Depends(_service)]
CallerDep = Annotated[Caller, Depends(_caller)]
