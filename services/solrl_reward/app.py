"""The FastAPI application of the reward service."""

from fastapi import FastAPI
from solrl_http.app import make_app

from solrl_reward import routes
from solrl_reward.reward_metrics import RewardMetrics
from solrl_reward.service import running_service
from solrl_reward.settings import RewardSettings


def create_app(settings: RewardSettings) -> FastAPI:
    """The service as an ASGI application, whose lifespan loads the rewards. For the error, see `make_app`."""
    metrics = RewardMetrics()
    return make_app(
        "solrl reward service",
        "Scores images: safetensors of images and prompts in, scores out. Errors are RFC 9457 problem documents.",
        (routes,),
        settings,
        metrics,
        lambda: running_service(settings, metrics),
    )
