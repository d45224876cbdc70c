"""Command line of the reward service: `solrl-reward serve | doctor`."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import tyro
from solrl_core.program import run_program
from solrl_http.command_line import parse_command

from solrl_reward.settings import RewardSettings

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


def main() -> None:
    """Entry point of `solrl-reward`. Exits with 2 if it cannot start, with the reason on stderr."""
    parse = partial(parse_command, PROGRAM, "The reward service of solrl.", _COMMANDS, RewardSettings)
    run_program(PROGRAM, parse, _run)


def _run(command: Command) -> int:
    if isinstance(command, RewardDoctor):
        from solrl_core.diagnosis import show

        from solrl_reward import doctor

        return show(f"{PROGRAM} doctor", doctor.check(command.settings))
    from solrl_reward.serve import serve

    serve(command.settings)
    return 0
