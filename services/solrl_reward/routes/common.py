"""The dependency that all routes share: the running service."""

from typing import Annotated

from fastapi import Depends, Request

from solrl_reward.service import RewardService


async def _service(request: Request) -> RewardService:
    service: RewardService = request.app.state.service
    return service


ServiceDep = Annotated[RewardService, Depends(_service)]
