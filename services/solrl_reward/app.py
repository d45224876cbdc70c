"""The FastAPI application of the reward service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from solrl_http.app import make_app

from solrl_reward import routes
from solrl_reward.reward_metrics import RewardMetrics
from solrl_reward.service import running_service
from solrl_reward.settings import RewardSettings


def create_app(settings: RewardSettings) -> FastAPI:
    """The service as an ASGI application, whose lifespan loads the rewards.

    `app.state.service` is the running `RewardService`. The lifespan raises errors that prevent the service from
    starting.

    Raises:
        TokenFileError: the settings name a token file that cannot be used.
    """
    service_metrics = RewardMetrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_service(settings, service_metrics) as service:
            app.state.service = service
            yield
            service.draining = True

    return make_app(
        "solrl reward service",
        "Scores images: safetensors of images and prompts in, scores out. Errors are RFC 9457 problem documents.",
        (routes,),
        settings,
        service_metrics,
        lifespan,
    )
