"""Settings of a server, by flag or by environment (`SOLRL_PORT`, …): its address, access, limits and log."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from solrl_proto.home import with_home

MIB = 2**20
SECRETS = Path("/run/secrets")
"""Folder of secret settings in containers, one file each, e.g. `solrl_redis_url`. The environment takes precedence."""
CONFIG = SettingsConfigDict(
    env_prefix="SOLRL_",
    extra="ignore",
    frozen=True,
    use_attribute_docstrings=True,
    secrets_dir=SECRETS if SECRETS.is_dir() else None,
)


def _split(value: Any) -> Any:
    if isinstance(value, str):
        value = tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(dict.fromkeys(value)) if isinstance(value, list | tuple) else value


Listed = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Different texts; in the environment they are separated by commas."""

JSON_OPTION = tyro.conf.arg(constructor=json.loads, metavar="JSON", help_behavior_hint="")
"""Marks a setting that is a mapping as an option in JSON."""


def names_differ(of: str, name: Callable[[str], str], expected: str) -> AfterValidator:
    """Validator of a `Listed` setting whose items have different names; `of` are the items in the plural."""

    def check(value: tuple[str, ...]) -> tuple[str, ...]:
        names = [name(text) for text in value]
        if len(set(names)) < len(names):
            raise ValueError(f"got two {of} with one name: {names}; expected {expected}")
        return value

    return AfterValidator(check)


def parse_reward(text: str, sign: str, expected: str) -> tuple[str, str]:
    """The name of a reward and what stands after `sign`, empty without one; ValueError if either part is missing."""
    name, separator, value = text.partition(sign)
    if not name or (separator and not value):
        raise ValueError(f"got reward {text!r}; expected {expected}")
    return name, value


ACCESS = ("host", "port", "token_file", "allow_anonymous", "published_at", "allowed_hosts", "log_format")
"""Settings of a server's address and access."""


class HttpSettings(BaseSettings):
    """Settings of a server's HTTP side; flags take precedence over the environment."""

    model_config = CONFIG

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"access": ACCESS}
    """Groups of options in the help. The limits are in no group, and come last."""

    token_scopes: ClassVar[str] = "rollout push"
    """Scopes of a usual client's token, for advice."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8100
    """Port to listen on; 0 picks a free one."""

    token_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Token file of `solrl-rollout token create`; without one, the service serves only this machine."""

    allow_anonymous: bool = False
    """Let anyone who reaches the address use, read and replace everything, without tokens."""

    published_at: Annotated[str | None, tyro.conf.arg(metavar="HOST", help_behavior_hint="(default: none)")] = None
    """Address of a container's published port; beyond loopback, it requires a token file even with allow_anonymous."""

    allowed_hosts: Annotated[Listed, tyro.conf.arg(help_behavior_hint="(default: none)")] = ()
    """Names and addresses that are allowed as Host, beside loopback, on a service without tokens."""

    slow_client_timeout: Annotated[float, Field(gt=0)] = 20.0
    """A body must bring 16 KiB per second, on average over this number of seconds."""

    keep_alive_timeout: Annotated[int, Field(ge=1)] = 60
    """Seconds that a connection may be idle."""

    max_connections: Annotated[int, Field(ge=1)] = 512
    """Maximum number of connections; with more, requests get 503."""

    log_format: Literal["auto", "json", "text"] = "auto"
    """Format of the log; auto is text on a terminal, otherwise JSON."""

    max_body_bytes: Annotated[int, Field(ge=1)] = 16 * MIB
    """Largest JSON body, in bytes."""

    max_inflight_bytes: Annotated[int, Field(ge=1)] = 1024 * MIB
    """Maximum bytes of request bodies, and of images for answers; further requests get 503."""

    drain_timeout: Annotated[int, Field(ge=0)] = 50
    """Seconds after a SIGTERM to finish accepted work."""

    @property
    def tenant_inflight_bytes(self) -> int:
        """Maximum bytes in memory of one tenant's request bodies."""
        return self.tenant_share(self.max_inflight_bytes, self.max_body_bytes)

    def tenant_share(self, limit: int, *largest: int) -> int:
        """One tenant's share of a limit: with tokens half of it, but room for one of the largest."""
        return limit if self.token_file is None else max(limit // 2, *largest)

    @model_validator(mode="before")
    @classmethod
    def _begins_at_home(cls, value: Any) -> Any:
        return with_home(value)


def require_within(settings: HttpSettings, *pairs: tuple[str, str]) -> None:
    """Raise ValueError if the first setting of a pair exceeds the second, its budget."""
    for name, bound in pairs:
        if (largest := getattr(settings, name)) > (budget := getattr(settings, bound)):
            raise ValueError(
                f"{name} is {largest} and {bound} {budget}: one of the largest size would always be refused; "
                f"raise {bound}, or lower {name}"
            )
