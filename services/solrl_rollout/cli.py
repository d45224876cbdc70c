"""`solrl-rollout serve | doctor | memory | token`."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import tyro
from pydantic import ValidationError
from solrl_proto.identifiers import NAME_PATTERN, Tier
from solrl_proto.problems import ProblemError

from solrl_rollout.http.tokens import Scope, create_token, parse_lifetime, read_tokens, revoke_token
from solrl_rollout.settings import Settings


@dataclass(frozen=True)
class Serve:
    """Load a model and serve rollouts over HTTP."""

    settings: Annotated[Settings, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Doctor:
    """Say what this machine can run with these settings, what is missing, and what to do."""

    settings: Annotated[Settings, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Memory:
    """Plan what a model takes on a GPU, from its configurations alone: weights, activations, batch limits."""

    model: str = "mini-sana"
    """Registered name, local folder in diffusers format, or hub id; no weights are needed."""
    precision: Tier = "nvfp4"
    """nvfp4 is the emulation."""
    batch: int = 24
    """Candidates in one batch."""
    revision: str | None = None
    """Hub commit or tag."""
    out: Path | None = None
    """Write the plan as JSON here, too."""


@dataclass(frozen=True)
class TokenCreate:
    """Make a token: it is printed once, alone on stdout, and kept nowhere."""

    tenant: str
    """Whose it is. Tenants see nothing of each other's runs."""
    scopes: tuple[Scope, ...]
    """What it may be used for: rollout (explore), push (store adapters), admin (metrics)."""
    expires: str = "90d"
    """How long it is good for: 12h, 30d, 8w; or never."""
    file: Path | None = None
    """The token file, made if need be; SOLRL_TOKEN_FILE by default."""


@dataclass(frozen=True)
class TokenList:
    """Say which tokens there are, whose, what for and for how long."""

    file: Path | None = None
    """The token file; SOLRL_TOKEN_FILE by default."""


@dataclass(frozen=True)
class TokenRevoke:
    """Take a token out of the file; a running service notices at its next request."""

    id: tyro.conf.Positional[str]
    """The token's id, as `token list` shows it."""
    file: Path | None = None
    """The token file; SOLRL_TOKEN_FILE by default."""


@dataclass(frozen=True)
class Tokens:
    """Make, list and revoke the tokens that let others use a service."""

    action: Annotated[
        Annotated[TokenCreate, tyro.conf.subcommand("create")]
        | Annotated[TokenList, tyro.conf.subcommand("list")]
        | Annotated[TokenRevoke, tyro.conf.subcommand("revoke")],
        tyro.conf.arg(name=""),
    ]


def main() -> None:
    """Entry point of `solrl-rollout`. Exit code 2: it cannot start, and says why on stderr."""
    # Set before torch is imported. OpenMP's threads otherwise spin for a while after each operation, and on a
    # small machine those of the service and those of the trainer take each other's cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        defaults = Settings()
    except ValidationError as error:
        faults = "; ".join(f"SOLRL_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors())
        _fail(f"the environment holds settings that are not valid: {faults}")
    command: Serve | Doctor | Memory | Tokens = tyro.cli(
        Annotated[Serve, tyro.conf.subcommand("serve", default=Serve(defaults))]
        | Annotated[Doctor, tyro.conf.subcommand("doctor", default=Doctor(defaults))]
        | Annotated[Memory, tyro.conf.subcommand("memory")]
        | Annotated[Tokens, tyro.conf.subcommand("token")],
        prog="solrl-rollout",
        description="The rollout service of solrl.",
    )
    if isinstance(command, Doctor):
        from solrl_rollout.doctor import examine

        sys.exit(examine(command.settings))
    try:
        if isinstance(command, Tokens):
            _manage_tokens(command.action, defaults.token_file)
            return
        if isinstance(command, Memory):
            from solrl_rollout.memory import plan

            token = defaults.hf_token.get_secret_value() if defaults.hf_token else None
            plan(
                command.model,
                command.precision,
                command.batch,
                revision=command.revision,
                token=token,
                out=command.out,
            )
            return
        from solrl_rollout.serve import serve

        serve(command.settings)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ProblemError, ValueError, OSError, RuntimeError) as error:
        _fail(str(error))


def _manage_tokens(action: TokenCreate | TokenList | TokenRevoke, default: Path | None) -> None:
    path = action.file or default
    if path is None:
        raise ValueError("got no token file; name one with --file or SOLRL_TOKEN_FILE")
    if isinstance(action, TokenList):
        print(f"{'id':10}{'tenant':20}{'scopes':22}{'made':12}expires")
        for token in read_tokens(path):
            ends = f"{token.expires:%Y-%m-%d %H:%M}{' (over)' if token.expired else ''}" if token.expires else "never"
            print(f"{token.id:10}{token.tenant:20}{' '.join(token.scopes):22}{token.created:%Y-%m-%d}  {ends}")
    elif isinstance(action, TokenRevoke):
        token = revoke_token(path, action.id)
        print(f"token {token.id} of {token.tenant} is revoked")
    else:
        try:
            secret, token = create_token(path, action.tenant, action.scopes, parse_lifetime(action.expires))
        except ValidationError:
            raise ValueError(f"got --tenant {action.tenant!r}; expected a name as {NAME_PATTERN}") from None
        ends = f"until {token.expires:%Y-%m-%d %H:%M} UTC" if token.expires else "for ever"
        print(f"token {token.id} of {token.tenant}, {' and '.join(token.scopes)}, {ends}; in {path}", file=sys.stderr)
        print(secret)


def _fail(message: str) -> NoReturn:
    print(f"solrl-rollout: {message}", file=sys.stderr)
    sys.exit(2)
