"""Command line of the reward service: `solrl-reward serve | doctor`."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from solrl_http.command_line import from_environment, parse_settings, run_program

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
    run_program(PROGRAM, _parse, _run)


def _parse(words: list[str]) -> Command:
    """The command that the words give; exits with 2 where they are not understood."""
    defaults = from_environment(PROGRAM, RewardSettings)
    if words and (kind := _COMMANDS.get(words[0])):
        return kind(parse_settings(defaults, f"{PROGRAM} {words[0]}", str(kind.__doc__), words[1:]))
    return tyro.cli(
        Annotated[ServeRewards, tyro.conf.subcommand("serve")]
        | Annotated[RewardDoctor, tyro.conf.subcommand("doctor")],
        prog=PROGRAM,
        description="The reward service of solrl. `--version` prints the version.",
        args=words if not words or words[0].startswith("-") else words[:1],  # --help would hide that it is none
    )


def _run(command: Command) -> int:
    if isinstance(command, RewardDoctor):
        from solrl_reward.doctor import doctor

        return doctor(command.settings)
    from solrl_reward.serve import serve

    serve(command.settings)
    return 0
