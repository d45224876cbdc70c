"""`solrl-rollout serve | doctor | memory`."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import tyro
from pydantic import ValidationError
from solrl_proto.identifiers import Tier
from solrl_proto.problems import ProblemError

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
    command: Serve | Doctor | Memory = tyro.cli(
        Annotated[Serve, tyro.conf.subcommand("serve", default=Serve(defaults))]
        | Annotated[Doctor, tyro.conf.subcommand("doctor", default=Doctor(defaults))]
        | Annotated[Memory, tyro.conf.subcommand("memory")],
        prog="solrl-rollout",
        description="The rollout service of solrl.",
    )
    if isinstance(command, Doctor):
        from solrl_rollout.doctor import examine

        sys.exit(examine(command.settings))
    try:
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


def _fail(message: str) -> NoReturn:
    print(f"solrl-rollout: {message}", file=sys.stderr)
    sys.exit(2)
