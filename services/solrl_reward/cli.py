"""Command line of the reward service: `solrl-reward serve | doctor`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import tyro
from solrl_http.command_line import parse_command

from solrl_reward.settings import RewardSettings

if TYPE_CHECKING:
    from solrl_core.diagnosis import Finding

    from solrl_reward.service import RewardService

PROGRAM = "solrl-reward"


@dataclass(frozen=True)
class ServeRewards:
    """Load rewards and serve them over HTTP. The environment may set every option: SOLRL_PORT is --port."""

    settings: Annotated[RewardSettings, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class RewardDoctor:
    """Check what this machine can score with these settings, what is missing, and what to do about it."""

    settings: Annotated[RewardSettings, tyro.conf.arg(name="")]


Command = ServeRewards | RewardDoctor
_COMMANDS: dict[str, type[Command]] = {"serve": ServeRewards, "doctor": RewardDoctor}
parse = partial(parse_command, PROGRAM, "The reward service of solrl.", _COMMANDS, RewardSettings)
"""Words → command; exits with 2, or raises a ValueError, if they are invalid."""


def dispatch(command: Command) -> int:
    """Run a command; returns its exit code."""
    if isinstance(command, RewardDoctor):
        from solrl_core.diagnosis import show

        return show(f"{PROGRAM} doctor", _findings(command.settings))
    from solrl_http import logs
    from solrl_http.serving import end_without, serve_app

    logs.install(command.settings.log_format)
    serve_app(command.settings, "solrl_reward.app", partial(_rows, command.settings))
    from solrl_reward.batcher import THREAD  # imports torch

    end_without(THREAD)
    return 0


def _rows(settings: RewardSettings, service: "RewardService", address: str) -> Iterator[tuple[str, str]]:
    for name, digest in service.digests.items():
        yield f"reward {name}", f"{digest} on {settings.torch_device}"
    yield "address", address


def _findings(settings: RewardSettings) -> Iterator["Finding"]:
    from solrl_core import diagnosis
    from solrl_http.doctor import access_rows, port_row

    yield from diagnosis.machine(settings.device, None, ("torch", "safetensors", "numpy", "pillow"))
    yield from diagnosis.rewards(
        list(settings.sources),
        settings.options_from,
        options=settings.reward_options,
        sources=settings.sources,
    )
    yield from (diagnosis.Finding(*row) for row in (*access_rows(settings), port_row(settings)))
