"""Command line of the reward service: `solrl-reward serve`."""

import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated

import tyro
from pydantic import ValidationError
from solrl_core.suggestions import check_command
from solrl_http.command_line import fail, fail_by, from_environment
from solrl_proto.problems import ProblemError

from solrl_reward.settings import Settings

PROGRAM = "solrl-reward"


@dataclass(frozen=True)
class Serve:
    """Load rewards and serve them over HTTP. The environment may set every option: SOLRL_PORT is --port."""

    settings: Annotated[Settings, tyro.conf.arg(name="")]


def main() -> None:
    """Entry point of `solrl-reward`. Exits with 2 if it cannot start, with the reason on stderr."""
    # Set before torch is imported, as in the rollout service.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    words = sys.argv[1:]
    if words == ["--version"]:
        print(f"{PROGRAM} {version('solrl')}")
        return
    check_command(PROGRAM, words, ["serve"])
    try:
        command = _parse(words, from_environment(PROGRAM, Settings))
    except ValidationError as error:
        fail_by(PROGRAM, "serve", error)
    from solrl_reward.serve import serve

    try:
        serve(command.settings)
    except (ProblemError, ValueError, OSError, RuntimeError) as error:
        fail(PROGRAM, str(error))


def _parse(words: list[str], defaults: Settings) -> Serve:
    """The command that the words give; exits with 2 where they are not understood."""
    if words[:1] == ["serve"]:
        return tyro.cli(Serve, default=Serve(defaults), prog=f"{PROGRAM} serve", args=words[1:])
    return tyro.extras.subcommand_cli_from_dict(
        {"serve": Serve},
        prog=PROGRAM,
        description="The reward service of solrl. `--version` prints the version.",
        args=words,
    )
