"""Routes of the reward service."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS, CallerDep, running_service, while_connected
from solrl_proto.scores import SCORES_MEDIA_TYPE, PromptCheck, PromptVerdict, RewardList, ScoreAnswer

from solrl_reward.service import RewardService

router = APIRouter(responses=PROBLEMS)

_BODY: dict[str, Any] = {
    "description": "A safetensors file: the tensor `images`, uint8 [N, 3, H, W] or of clips [N, F, 3, H, W], and in "
    "the metadata field `request` "
    'the request as JSON, {"rewards": [NAME, …], "prompts": [{"text": …, "metadata": {…}}, …]}, a prompt per image',
    "required": True,
    "content": {SCORES_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}


ServiceDep = Annotated[RewardService, Depends(running_service)]


@router.get("/health/live", tags=["health"])
@access("open")
async def live(service: ServiceDep) -> dict[str, str]:
    """200 while all rewards return in time; 503 if a reward does not: restart the process. Other rewards go on.

    The process ends by itself if it can score nothing more.
    """
    service.require_live()
    return {"status": "live"}


@router.get("/health/ready", tags=["health"])
@access("open")
async def ready(service: ServiceDep) -> dict[str, str]:
    """200 while new work is accepted; names no reward."""
    service.require_ready()
    return {"status": "ready"}


@router.get("/v1/rewards", tags=["rewards"])
@access("token")
async def list_rewards(service: ServiceDep) -> RewardList:
    """The rewards and their digests. Clients compare the digests with their own."""
    return service.list()


@router.post("/v1/prompts", tags=["rewards"])
@access("score")
async def check_prompts(service: ServiceDep, body: PromptCheck) -> PromptVerdict:
    """The first prompt whose text or metadata the reward cannot use, and why."""
    return await service.check(body)


@router.post("/v1/scores", tags=["scores"], response_model=ScoreAnswer, openapi_extra={"requestBody": _BODY})
@access("score", queues_work=True)
async def make_scores(request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Score images, perhaps in one batch with other requests. Closing the connection takes them from the queue."""
    # Neither the request nor this function keeps the body: while the images wait, they are in memory once.
    images = await service.decode(b"".join([part async for part in request.stream() if part]))
    answer = await while_connected(request.receive, service.score(images, caller.tenant))
    return Response(answer.model_dump_json(), media_type="application/json")
