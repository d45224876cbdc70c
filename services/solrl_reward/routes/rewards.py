"""The rewards that the service computes."""

from fastapi import APIRouter
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS
from solrl_proto.scores import RewardList

from solrl_reward.routes.common import ServiceDep

router = APIRouter(prefix="/v1", tags=["rewards"], responses=PROBLEMS)


@router.get("/rewards")
@access("token")
async def list_rewards(service: ServiceDep) -> RewardList:
    """The rewards and their digests, by which clients compare them with their own."""
    return service.list()
