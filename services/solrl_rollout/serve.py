"""`solrl-rollout serve`: the rollout service until a signal."""

import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from solrl_http import logs
from solrl_http.serving import end_without, serve_app

from solrl_rollout.settings import RolloutSettings

if TYPE_CHECKING:
    from solrl_rollout.service import Service

logger = logging.getLogger(__name__)


def serve(settings: RolloutSettings) -> None:
    """Serve until a SIGTERM or SIGINT, then finish accepted work. For errors, see `serve_app`."""
    logs.install(settings.log_format)
    _warn_of_password(settings, sys.argv)
    serve_app(settings, "solrl_rollout.http.app", partial(_rows, settings))
    from solrl_rollout.engine.engine import THREADS  # imports torch

    end_without(THREADS)


def _warn_of_password(settings: RolloutSettings, arguments: Sequence[str]) -> None:
    by_option = any(argument.partition("=")[0] == "--redis-url" for argument in arguments)
    if by_option and settings.redis_url and urlsplit(settings.redis_url).password:
        logger.warning("other users can read the password in --redis-url; use --redis-url-file or SOLRL_REDIS_URL")


def _rows(settings: RolloutSettings, service: "Service", address: str) -> Iterator[tuple[str, str]]:
    for hosted in service.hosted.values():
        model = hosted.info
        yield "model", f"{model.name} ({model.family}, {model.width}×{model.height}) on {hosted.device}"
        for info in model.precisions:
            quantised = f", {info.quantized_share:.1%} of the blocks' linear FLOPs quantised"
            default = " (default)" if info.precision == hosted.default_precision else ""
            yield f"precision {info.precision}", info.numerics + (quantised if info.quantized_share else "") + default
    yield "rewards", ", ".join(settings.rewards)
    if settings.reward_hosts:
        yield "rewards of runs", "at " + ", ".join(settings.reward_hosts)
    yield "adapter store", "Redis" if settings.store_url else "in this process, lost when it exits"
    yield "address", address
    yield "page", f"{address}/"
