"""Prompts: whether a reward can judge images of them, asked before there are any."""

from fastapi import APIRouter
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS
from solrl_proto.scores import PromptCheck, PromptVerdict

from solrl_reward.routes.common import ServiceDep

router = APIRouter(prefix="/v1", tags=["rewards"], responses=PROBLEMS)


@router.post("/prompts")
@access("score")
async def check_prompts(service: ServiceDep, body: PromptCheck) -> PromptVerdict:
    """The first prompt with whose text or metadata the reward cannot judge, and why."""
    return await service.check(body)
