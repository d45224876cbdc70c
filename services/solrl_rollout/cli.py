"""Command line of the service: `solrl-rollout serve | check | doctor | memory | token`."""

import sys
from pathlib import Path
from typing import Annotated, cast

import tyro
from pydantic import ValidationError
from solrl_http.command_line import from_environment, parse_settings, run_program
from solrl_http.tokens import create_token, parse_lifetime, read_tokens, revoke_token
from solrl_proto.home import with_home
from solrl_proto.identifiers import NAME_RULE

from solrl_rollout.options import (
    COMMANDS,
    Check,
    Command,
    RolloutDoctor,
    ServeRollouts,
    ServingMemory,
    TokenCreate,
    TokenList,
    TokenRevoke,
    Tokens,
)
from solrl_rollout.settings import RolloutSettings

PROGRAM = "solrl-rollout"


def main() -> None:
    """Entry point of `solrl-rollout`. Exits with 2 if it cannot start, with the reason on stderr."""
    run_program(PROGRAM, _parse, _run)


def _parse(words: list[str]) -> Command:
    """The command that the words give; exits with 2 where they are not understood."""
    defaults = from_environment(PROGRAM, RolloutSettings)
    if words and (kind := COMMANDS.get(words[0])):
        # By the parser of this command alone: it suggests no options of other commands.
        program = f"{PROGRAM} {words[0]}"
        if kind in (ServeRollouts, RolloutDoctor):
            return cast(Command, kind(parse_settings(defaults, program, str(kind.__doc__), words[1:])))
        return cast(Command, with_home(tyro.cli(kind, prog=program, args=words[1:])))
    return tyro.cli(
        Annotated[ServeRollouts, tyro.conf.subcommand("serve")]
        | Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[RolloutDoctor, tyro.conf.subcommand("doctor")]
        | Annotated[ServingMemory, tyro.conf.subcommand("memory")]
        | Annotated[Tokens, tyro.conf.subcommand("token")],
        prog=PROGRAM,
        description="The rollout service of solrl. `--version` prints the version.",
        args=words if not words or words[0].startswith("-") else words[:1],  # --help would hide that it is none
    )


def _run(command: Command) -> int:
    """Run a command; returns the exit code."""
    match command:
        case ServeRollouts():
            from solrl_rollout.serve import serve

            serve(command.settings)
        case RolloutDoctor():
            from solrl_rollout.doctor import doctor

            return doctor(command.settings)
        case Check():
            from solrl_rollout.check import check, read_prompts

            return check(command, read_prompts(command.prompts, command.groups))
        case ServingMemory():
            from solrl_rollout.memory_report import plan

            plan(command)
        case Tokens():
            _manage_tokens(command.action, from_environment(PROGRAM, RolloutSettings).token_file)
    return 0


def _manage_tokens(action: TokenCreate | TokenList | TokenRevoke, default: Path | None) -> None:
    path = action.file or default
    if path is None:
        raise ValueError("got no token file; pass one with --file or SOLRL_TOKEN_FILE")
    if isinstance(action, TokenList):
        tokens = read_tokens(path)
        print(f"{'id':10}{'tenant':20}{'scopes':22}{'created':12}expires")
        for token in tokens:
            ends = (
                f"{token.expires:%Y-%m-%d %H:%M}{' (expired)' if token.expired else ''}" if token.expires else "never"
            )
            print(f"{token.id:10}{token.tenant:20}{' '.join(token.scopes):22}{token.created:%Y-%m-%d}  {ends}")
    elif isinstance(action, TokenRevoke):
        token = revoke_token(path, action.id)
        print(f"token {token.id} of {token.tenant} is revoked")
    else:
        try:
            secret, token = create_token(path, action.tenant, action.scopes, parse_lifetime(action.expires))
        except ValidationError:
            raise ValueError(f"got --tenant {action.tenant!r}; expected a name of {NAME_RULE}") from None
        ends = f"until {token.expires:%Y-%m-%d %H:%M} UTC" if token.expires else "without expiry"
        print(f"token {token.id} of {token.tenant}, {' and '.join(token.scopes)}, {ends}; in {path}", file=sys.stderr)
        print(secret)
