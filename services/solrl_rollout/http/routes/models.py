"""The hosted models."""

from fastapi import APIRouter
from solrl_http.access import access
from solrl_http.routes.common import PROBLEMS
from solrl_proto.models import ModelList

from solrl_rollout.http.routes.common import ServiceDep

router = APIRouter(prefix="/v1", tags=["models"], responses=PROBLEMS)


@router.get("/models")
@access("token")
async def list_models(service: ServiceDep) -> ModelList:
    """The hosted models, digests of all parts that generate or score images, and the noise contract."""
    return ModelList(
        noise=service.noise,
        models=tuple(model.info for model in service.hosted.values()),
        reward_hosts=service.settings.reward_hosts,
    )
