"""`solrl-reward serve`: the reward service until a signal."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from solrl_http import logs
from solrl_http.serving import end_without, serve_app

from solrl_reward.settings import RewardSettings

if TYPE_CHECKING:
    from solrl_reward.service import RewardService


def serve(settings: RewardSettings) -> None:
    """Serve until a SIGTERM or SIGINT, then finish accepted work.

    Raises:
        ProblemError, ValueError, OSError, RuntimeError: the service cannot start.
        ServiceDiedError: the service died; a supervisor should restart the process.
    """
    logs.install(settings.log_format)
    serve_app(settings, "solrl_reward.app", partial(_rows, settings))
    from solrl_reward.batcher import THREAD  # imports torch

    end_without(THREAD)


def _rows(settings: RewardSettings, service: "RewardService", address: str) -> Iterator[tuple[str, str]]:
    for name, digest in service.digests.items():
        yield f"reward {name}", f"{digest} on {settings.torch_device}"
    yield "address", address
