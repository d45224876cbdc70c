"""Command line of the reward service: `solrl-reward serve`."""

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


def main() -> None:
    """Entry point of `solrl-reward`. Exits with 2 if it cannot start, with the reason on stderr."""
    run_program(PROGRAM, _parse, _run)


def _parse(words: list[str]) -> ServeRewards:
    """The command that the words give; exits with 2 where they are not understood."""
    defaults = from_environment(PROGRAM, RewardSettings)
    if words[:1] == ["serve"]:
        return ServeRewards(parse_settings(defaults, f"{PROGRAM} serve", str(ServeRewards.__doc__), words[1:]))
    return tyro.extras.subcommand_cli_from_dict(
        {"serve": ServeRewards},
        prog=PROGRAM,
        description="The reward service of solrl. `--version` prints the version.",
        args=words if not words or words[0].startswith("-") else words[:1],  # --help would hide that it is none
    )


def _run(command: ServeRewards) -> int:
    from solrl_reward.serve import serve

    serve(command.settings)
    return 0
