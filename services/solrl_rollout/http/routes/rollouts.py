"""The hosted models, and rollouts: prompts and group size in, seeds and proxy rewards out."""

import asyncio

from fastapi import APIRouter, Request, Response
from solrl_http.access import access
from solrl_http.problem_responses import draining, internal_error
from solrl_http.routes.common import PROBLEMS, CallerDep, while_connected
from solrl_proto.models import ModelList
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import (
    STREAM_MEDIA_TYPE,
    ErrorLine,
    RolloutAnswer,
    RolloutRequest,
    StartLine,
    StreamLine,
)
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from solrl_rollout.engine.rollout import RolloutHandle
from solrl_rollout.http.routes import ServiceDep

router = APIRouter(prefix="/v1", responses=PROBLEMS)


@router.get("/models", tags=["models"])
@access("token")
async def list_models(service: ServiceDep, caller: CallerDep) -> ModelList:
    """The hosted models, digests of all parts that generate or score images, and the noise contract."""
    return ModelList(
        noise=service.noise,
        models=tuple(model.info for model in service.hosted.values()),
        reward_hosts=service.settings.reward_hosts,
        scopes=caller.scopes,
    )


@router.post(
    "/rollouts",
    tags=["rollouts"],
    response_model=RolloutAnswer,
    responses={
        200: {
            "description": f"One document; or, if Accept names {STREAM_MEDIA_TYPE}, a start, a line per group, an end",
            "content": {STREAM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/StreamLine"}}},
        }
    },
)
@access("rollout", queues_work=True)
async def make_rollouts(request: Request, service: ServiceDep, caller: CallerDep, body: RolloutRequest) -> Response:
    """Generate and score candidates for each prompt. Closing the connection cancels unfinished work."""
    rollout = await service.accept(body, caller.tenant, request.state.reserve)
    if STREAM_MEDIA_TYPE in request.headers.get("accept", ""):
        return RolloutLines(rollout)
    try:
        answer = await while_connected(request.receive, rollout.answer())
    finally:
        await rollout.close()
    # Written directly: FastAPI would validate thousands of numbers a second time.
    return Response(answer.model_dump_json(), media_type="application/json")


class RolloutLines(Response):
    """The answer as NDJSON, which always closes its rollout."""

    media_type = STREAM_MEDIA_TYPE

    def __init__(self, rollout: RolloutHandle) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._rollout = rollout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the start line, a line per group, then the end line or the error."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            await self._rollout.close()

    async def _send_all(self, send: Send) -> None:
        async def write(line: StreamLine) -> None:
            body = line.model_dump_json().encode() + b"\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await write(StartLine(served=self._rollout.served))
            async for group in self._rollout.groups():
                await write(group)
            await write(self._rollout.end())
        except ProblemError as error:
            await write(ErrorLine(problem=error.problem))
        except asyncio.CancelledError:  # a client that disconnected never sees this line
            await write(ErrorLine(problem=draining("the drain timeout is over").problem))
            raise
        except Exception:
            await write(ErrorLine(problem=internal_error()))
            raise
        finally:
            await send({"type": "http.response.body", "body": b""})
