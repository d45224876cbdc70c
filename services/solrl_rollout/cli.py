"""Command line of the service: `solrl-rollout serve | doctor | memory | token`."""

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
    """Check what this machine can run with these settings, what is missing, and what to do about it."""

    settings: Annotated[Settings, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Memory:
    """Plan a model's memory on a GPU from its configurations alone: weights, activations, batch limits."""

    model: str = "mini-sana"
    """Registered name, local folder in diffusers format, or hub id; no weights are needed."""
    precision: Tier = "nvfp4"
    """Precision; nvfp4 is planned as emulated."""
    batch: int = 24
    """Candidates in one batch."""
    revision: str | None = None
    """Hub commit or tag."""
    out: Path | None = None
    """Also write the plan as JSON to this file."""


@dataclass(frozen=True)
class TokenCreate:
    """Create a token. It is printed once, to stdout, and is not stored."""

    tenant: str
    """Tenant of the token. Tenants cannot see each other's runs."""
    scopes: tuple[Scope, ...]
    """Permissions: rollout (explore), push (store adapters), admin (metrics)."""
    expires: str = "90d"
    """Lifetime: 12h, 30d, 8w; or never."""
    file: Path | None = None
    """Token file, created if necessary; SOLRL_TOKEN_FILE by default."""


@dataclass(frozen=True)
class TokenList:
    """List tokens with their tenants, scopes and lifetimes."""

    file: Path | None = None
    """Token file; SOLRL_TOKEN_FILE by default."""


@dataclass(frozen=True)
class TokenRevoke:
    """Remove a token from the file; a running service refuses it from the next request on."""

    id: tyro.conf.Positional[str]
    """Id of the token, from `token list`."""
    file: Path | None = None
    """Token file; SOLRL_TOKEN_FILE by default."""


@dataclass(frozen=True)
class Tokens:
    """Create, list and revoke access tokens of a service."""

    action: Annotated[
        Annotated[TokenCreate, tyro.conf.subcommand("create")]
        | Annotated[TokenList, tyro.conf.subcommand("list")]
        | Annotated[TokenRevoke, tyro.conf.subcommand("revoke")],
        tyro.conf.arg(name=""),
    ]


def main() -> None:
    """Entry point of `solrl-rollout`. Exits with 2 if it cannot start, with the reason on stderr."""
    # Set before torch is imported. Otherwise OpenMP's threads spin after each operation, and on a small machine
    # service and trainer compete for cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        defaults = Settings()
    except ValidationError as error:
        faults = "; ".join(f"SOLRL_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors())
        _fail(f"the environment has invalid settings: {faults}")
    command: Serve | Doctor | Memory | Tokens = tyro.cli(
        Annotated[Serve, tyro.conf.subcommand("serve", default=Serve(defaults))]
        | Annotated[Doctor, tyro.conf.subcommand("doctor", default=Doctor(defaults))]
        | Annotated[Memory, tyro.conf.subcommand("memory")]
        | Annotated[Tokens, tyro.conf.subcommand("token")],
        prog="solrl-rollout",
        description="The rollout service of solrl.",
    )
    try:
        if isinstance(command, Doctor):
            from solrl_rollout.doctor import doctor

            sys.exit(doctor(command.settings))
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
    except (ProblemError, ValueError, OSError, RuntimeError) as error:
        _fail(str(error))


def _manage_tokens(action: TokenCreate | TokenList | TokenRevoke, default: Path | None) -> None:
    path = action.file or default
    if path is None:
        raise ValueError("got no token file; pass one with --file or SOLRL_TOKEN_FILE")
    if isinstance(action, TokenList):
        print(f"{'id':10}{'tenant':20}{'scopes':22}{'created':12}expires")
        for token in read_tokens(path):
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
            raise ValueError(f"got --tenant {action.tenant!r}; expected a name as {NAME_PATTERN}") from None
        ends = f"until {token.expires:%Y-%m-%d %H:%M} UTC" if token.expires else "without expiry"
        print(f"token {token.id} of {token.tenant}, {' and '.join(token.scopes)}, {ends}; in {path}", file=sys.stderr)
        print(secret)


def _fail(message: str) -> NoReturn:
    print(f"solrl-rollout: {message}", file=sys.stderr)
    sys.exit(2)
