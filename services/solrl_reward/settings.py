"""Settings of `solrl-reward serve`, by flag or by environment (`SOLRL_REWARDS`, `SOLRL_PORT`, …)."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import tyro
from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode
from solrl_core.devices import DeviceName, resolve_device
from solrl_http.settings import (
    ACCESS,
    CONFIG,
    JSON_OPTION,
    MIB,
    HttpSettings,
    Listed,
    names_differ,
    parse_reward,
    require_within,
)
from solrl_proto.home import with_home
from solrl_proto.scores import MAX_SCORED_IMAGES


def _parse_reward(text: str) -> tuple[str, str]:
    """A reward's served name, and its source. The source is empty if it equals the name."""
    return parse_reward(text, "=", "a name, package.module:attribute, or name=source")


class Scoring(BaseSettings):
    """Settings of the rewards of one service process, and of their device."""

    model_config = CONFIG

    rewards: Annotated[
        Listed,
        Field(min_length=1),
        names_differ("rewards", lambda text: _parse_reward(text)[0], "name=source for one of them"),
    ] = ("clipscore",)
    """Rewards to serve, by name or package.module:attribute; name=source serves one under another name."""

    reward_options: Annotated[dict[str, dict[str, Any]], NoDecode, JSON_OPTION] = Field(default_factory=dict)
    """Options of rewards, as a run's. For example '{"hpsv2": {"dtype": "bfloat16"}}'."""

    options_from: Annotated[str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="(default: none)")] = None
    """Model, by registered name or folder, whose solrl.json has options of rewards. Its weights are not loaded."""

    device: DeviceName = "auto"
    """cpu, cuda, cuda:1, …; auto is CUDA if available, otherwise the CPU."""

    batch: Annotated[int, Field(ge=1)] = 32
    """Maximum images of several requests that are scored together; one request may have more."""

    score_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Most seconds of a reward, apart from waiting for another service; then its requests fail and /health/live
    answers 503."""

    queue_limit: Annotated[int, Field(ge=MAX_SCORED_IMAGES)] = 4096
    """Maximum number of waiting images; further requests get 429."""


class RewardSettings(HttpSettings, Scoring):
    """Settings of one reward service; flags take precedence over the environment."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rewards": ("rewards", "reward_options", "options_from", "device", "batch"),
        "access": ACCESS,
    }
    token_scopes: ClassVar[str] = "score"

    port: Annotated[int, Field(ge=0, le=65535)] = 8200
    """Port to listen on; 0 picks a free one."""

    max_body_bytes: Annotated[int, Field(ge=1)] = 256 * MIB
    """Largest request, in bytes: 80 images of 1024² pixels."""

    @property
    def tenant_images(self) -> int:
        """Maximum number of one tenant's waiting images."""
        return self.tenant_share(self.queue_limit, MAX_SCORED_IMAGES)

    @property
    def torch_device(self) -> str:
        return resolve_device(self.device)

    @field_validator("reward_options", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        """Read JSON of the environment; empty, as docker-compose.yml passes a variable that is not set, means none."""
        return with_home(json.loads(value or "{}")) if isinstance(value, str) else value

    @property
    def sources(self) -> dict[str, str]:
        """Served name → registered name or package.module:attribute."""
        return {name: source or name for name, source in map(_parse_reward, self.rewards)}

    @model_validator(mode="after")
    def _largest_body_fits(self) -> Self:
        require_within(self, ("max_body_bytes", "max_inflight_bytes"))
        return self
