"""Command line of the service: `solrl-rollout serve | check | doctor | memory | token`."""

import sys
from functools import partial
from pathlib import Path

from pydantic import ValidationError
from solrl_http.command_line import from_environment, parse_command
from solrl_http.tokens import create_token, parse_lifetime, read_tokens, revoke_token
from solrl_proto.identifiers import NAME_RULE

from solrl_rollout import options
from solrl_rollout.settings import RolloutSettings

PROGRAM = "solrl-rollout"
parse = partial(parse_command, PROGRAM, "The rollout service of solrl.", options.COMMANDS, RolloutSettings)
"""Words → command; exits with 2, or raises a ValueError, if they are invalid."""


def dispatch(command: options.Command) -> int:
    """Run a command; returns its exit code."""
    match command:
        case options.ServeRollouts():
            from solrl_rollout.serve import serve

            serve(command.settings)
        case options.RolloutDoctor():
            from solrl_core.diagnosis import show

            from solrl_rollout import doctor

            return show(f"{PROGRAM} doctor", doctor.check(command.settings))
        case options.Check():
            from solrl_rollout.check import check, read_prompts

            return check(command, read_prompts(command.prompts, command.groups))
        case options.ServingMemory():
            from solrl_rollout.memory_report import plan

            plan(command)
        case options.Tokens():
            _manage_tokens(command.action, from_environment(RolloutSettings).token_file)
    return 0


def _manage_tokens(action: options.TokenCreate | options.TokenList | options.TokenRevoke, default: Path | None) -> None:
    path = action.file or default
    if path is None:
        raise ValueError("got no token file; pass one with --file or SOLRL_TOKEN_FILE")
    if isinstance(action, options.TokenList):
        tokens = read_tokens(path)
        print(f"{'id':10}{'tenant':20}{'scopes':22}{'created':12}expires")
        for token in tokens:
            ends = (
                f"{token.expires:%Y-%m-%d %H:%M}{' (expired)' if token.expired else ''}" if token.expires else "never"
            )
            print(f"{token.id:10}{token.tenant:20}{' '.join(token.scopes):22}{token.created:%Y-%m-%d}  {ends}")
    elif isinstance(action, options.TokenRevoke):
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
