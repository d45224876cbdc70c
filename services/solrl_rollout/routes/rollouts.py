"""Prompts and group size in, seeds and proxy rewards out."""

import asyncio

from fastapi import APIRouter, Request, Response
from solrl_proto.rollouts import RolloutAnswer, RolloutRequest
from starlette.requests import ClientDisconnect

from solrl_rollout.routes.common import PROBLEMS, ServiceDep

router = APIRouter(prefix="/v1", tags=["rollouts"], responses=PROBLEMS)


@router.post("/rollouts", response_model=RolloutAnswer)
async def make_rollouts(request: Request, service: ServiceDep, body: RolloutRequest) -> Response:
    """Make and score each prompt's candidates. Leaving frees what was not made yet."""
    work = asyncio.create_task(service.rollout(body))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        answer = work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
    # Written directly: FastAPI would validate thousands of numbers a second time.
    return Response(answer.model_dump_json(), media_type="application/json")


async def _disconnected(request: Request) -> None:
    # The body was read before, so what comes next is the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
        pass
