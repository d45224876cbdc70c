"""The dependency that all routes share: the running service.

It is a coroutine although it awaits nothing: FastAPI would run a plain function in a thread, which gets little time
while the engine computes.
"""

from typing import Annotated

from fastapi import Depends, Request

from solrl_rollout.service import Service


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]
