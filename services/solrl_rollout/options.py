"""The commands of `solrl-rollout` with their options."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from solrl_core.model_options import ImageSize
from solrl_http.settings import JSON_OPTION
from solrl_http.tokens import Scope
from solrl_proto.identifiers import Precision
from solrl_proto.rollouts import Solver

from solrl_rollout.settings import FRAMES, PIXELS, RolloutSettings

TokenFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: SOLRL_TOKEN_FILE)")]


@dataclass(frozen=True)
class ServeRollouts:
    """Load models and serve rollouts over HTTP. The environment may set every option: SOLRL_PORT is --port."""

    settings: Annotated[RolloutSettings, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class RolloutDoctor:
    """Check what this machine can run with these settings, what is missing, and what to do about it."""

    settings: Annotated[RolloutSettings, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class _Sized:
    height: Annotated[int | None, PIXELS] = None
    """Height of images in pixels."""
    width: Annotated[int | None, PIXELS] = None
    """Width of images in pixels."""
    frames: Annotated[int | None, FRAMES] = None
    """Frames of clips, for a model that makes clips."""
    revision: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: main)")] = None
    """Hub commit or tag."""

    @property
    def size(self) -> ImageSize:
        """Size of images; None for what the options leave to the model."""
        return ImageSize(self.height, self.width, self.frames)


@dataclass(frozen=True, kw_only=True)
class Check(_Sized):
    """Check that a model ranks candidates at a precision as in BF16."""

    model: tyro.conf.Positional[str]
    """Registered name, local folder in diffusers format, hub id, or FILE.safetensors+ one of these."""
    precision: tuple[Precision, ...] = ()
    """Precisions to check; by default all but BF16 that the device supports."""
    rewards: tuple[str, ...] = ("clipscore",)
    """Rewards that judge."""
    reward_options: Annotated[dict[str, dict[str, Any]], JSON_OPTION] = field(default_factory=dict)
    """Options of rewards, as `--reward-options` of `serve`."""
    prompts: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: of shapes)")] = None
    """Text file with a prompt on each line, or a registered prompt set; the first ones are used."""
    groups: int = 6
    """Number of prompts, at most 24 of the default ones."""
    candidates: int = 24
    """Candidates of each prompt."""
    steps: int = 6
    """Solver steps at the checked precisions."""
    true_steps: int = 10
    """Solver steps of the reference in BF16."""
    solver: Solver = "euler"
    """Solver of both."""
    device: str = "auto"
    """The device: auto, cpu, cuda or cuda:1, for example."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: none)")] = None
    """Folder for check.json and images of each precision side by side."""


@dataclass(frozen=True, kw_only=True)
class ServingMemory(_Sized):
    """Plan a model's memory on a GPU from its configurations alone: weights, activations, batch limits."""

    model: str = "mini-sana"
    """Registered name, local folder in diffusers format, hub id, or FILE.safetensors+ one of these."""
    precision: tuple[Precision, ...] = ("nvfp4",)
    """One precision, or several if requests ask for several; nvfp4 is planned as emulated."""
    batch: int = 24
    """Candidates in one batch."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Also write the plan as JSON to this file."""


@dataclass(frozen=True)
class TokenCreate:
    """Create a token. It is printed once, to stdout, and is not stored."""

    tenant: str
    """Tenant of the token. Tenants cannot see each other's runs."""
    scopes: tuple[Scope, ...]
    """Permissions: rollout (explore), push (store adapters), score (at a reward service), admin (metrics)."""
    expires: str = "90d"
    """Lifetime: 12h, 30d, 8w; or never."""
    file: TokenFile = None
    """Token file, created if necessary."""


@dataclass(frozen=True)
class TokenList:
    """List tokens with their tenants, scopes and lifetimes."""

    file: TokenFile = None
    """Token file."""


@dataclass(frozen=True)
class TokenRevoke:
    """Remove a token from the file; a running service refuses it from the next request on."""

    id: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """Id of the token, from `token list`."""
    file: TokenFile = None
    """Token file."""


@dataclass(frozen=True)
class Tokens:
    """Create, list and revoke access tokens of a service."""

    action: Annotated[
        Annotated[TokenCreate, tyro.conf.subcommand("create")]
        | Annotated[TokenList, tyro.conf.subcommand("list")]
        | Annotated[TokenRevoke, tyro.conf.subcommand("revoke")],
        tyro.conf.arg(name=""),
    ]


Command = ServeRollouts | Check | RolloutDoctor | ServingMemory | Tokens
COMMANDS: dict[str, type[Command]] = {
    "serve": ServeRollouts,
    "check": Check,
    "doctor": RolloutDoctor,
    "memory": ServingMemory,
    "token": Tokens,
}
