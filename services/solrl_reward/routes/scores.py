"""Scores: images and prompts in, scores out."""

from typing import Any

from fastapi import APIRouter, Request, Response
from solrl_http.access import access
from solrl_http.connected import while_connected
from solrl_http.routes.common import PROBLEMS, CallerDep
from solrl_proto.scores import SCORES_MEDIA_TYPE, ScoreAnswer

from solrl_reward.routes.common import ServiceDep

router = APIRouter(prefix="/v1", tags=["scores"], responses=PROBLEMS)

_BODY: dict[str, Any] = {
    "description": "A safetensors file: the tensor `images`, uint8 [N, 3, H, W] or of clips [N, F, 3, H, W], and in "
    "the metadata field `request` "
    'the request as JSON, {"rewards": [NAME, …], "prompts": [{"text": …, "metadata": {…}}, …]}, a prompt per image',
    "required": True,
    "content": {SCORES_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}


@router.post("/scores", response_model=ScoreAnswer, openapi_extra={"requestBody": _BODY})
@access("score", queues_work=True)
async def make_scores(request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Score images, perhaps in one batch with other requests. Closing the connection takes them from the queue."""
    # Neither the request nor this function keeps the body: while the images wait, they are in memory once.
    images = await service.decode(b"".join([part async for part in request.stream() if part]))
    answer = await while_connected(request.receive, service.score(images, caller.tenant))
    return Response(answer.model_dump_json(), media_type="application/json")
