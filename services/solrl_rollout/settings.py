"""Settings of `solrl-rollout serve`, by flag or by environment (`SOLRL_MODEL`, `SOLRL_PORT`, …)."""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import tyro
from pydantic import Field, PositiveInt, field_validator, model_validator
from pydantic_settings import BaseSettings
from solrl_client.addresses import origin
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
from solrl_proto.identifiers import NAME_PATTERN, NAME_RULE
from solrl_proto.model_names import default_model_name, split_checkpoint
from solrl_proto.rollouts import RequestedPrecision
from solrl_proto.text_files import naming, read_text

from solrl_rollout.store.run_store import DEFAULT_RETAIN


class ModelSpec(NamedTuple):
    """A model to host: its name in requests, its location, and its revision on the hub."""

    name: str
    location: str
    revision: str | None


def parse_model(text: str) -> ModelSpec:
    """Parse `[name=]location[@revision]`. The name of an existing file or folder may contain both signs.

    Raises:
        ValueError: the name is not valid, or the location is empty.
    """
    name, location, revision = None, text, None
    if "=" in location and not Path(split_checkpoint(location)[0] or location).exists():
        name, _, location = location.partition("=")
    base = split_checkpoint(location)[1]
    if "@" in base and not Path(base).exists():
        location, _, revision = location.rpartition("@")
    if not location or revision == "" or (name is not None and not re.fullmatch(NAME_PATTERN, name)):
        raise ValueError(f"got model {text!r}; expected [name=]location[@revision], the name of {NAME_RULE}")
    return ModelSpec(name or default_model_name(location), with_home(location), revision)


def _parse_reward(text: str) -> tuple[str, str]:
    """A reward's name, and the address of the server that computes it, empty if none does."""
    return parse_reward(text, "@", "a name, or name@http://HOST:PORT of a reward server")


PIXELS = tyro.conf.arg(metavar="PIXELS", help_behavior_hint="(default: the model's)")
FRAMES = tyro.conf.arg(metavar="COUNT", help_behavior_hint="(default: the model's)")


class Hosting(BaseSettings):
    """Settings of the models and rewards of one service process, their devices and their store."""

    model_config = CONFIG

    model: Annotated[
        Listed,
        Field(min_length=1),
        names_differ("models", lambda text: parse_model(text).name, "name=location for one of them"),
    ] = ("mini-sana",)
    """Models to host, each [name=]location[@revision], the location as a run's model."""

    device: DeviceName = "auto"
    """cpu, cuda, cuda:1, …; auto is CUDA if available, otherwise the CPU."""

    gpus: Annotated[str | None, tyro.conf.arg(metavar="all|0,1,…", help_behavior_hint="(default: one, by device)")] = (
        None
    )
    """GPUs to serve from one queue: all, or their numbers."""

    workers: Annotated[int | str, tyro.conf.arg(metavar="N|ray|ray:N")] = 1
    """Worker processes on the CPU, which share its cores (or use OMP_NUM_THREADS threads each).
    ray: one on each GPU of this machine's Ray cluster; ray:N: N of them, also on CPUs."""

    engine: Literal["solrl", "vllm-omni"] = "solrl"
    """Computes the transformer; vllm-omni needs the packages of deploy/vllm-omni.lock."""

    engine_options: Annotated[dict[str, Any], JSON_OPTION] = Field(default_factory=dict)
    """Fields of vLLM-Omni's OmniDiffusionConfig."""

    precision: RequestedPrecision = "auto"
    """Precision of requests with auto; auto is the fastest native one."""

    emulate: bool = False
    """Also serve NVFP4 on a GPU without its units, slower than BF16. A CPU emulates it anyway."""

    height: Annotated[PositiveInt | None, PIXELS] = None
    """Height of images in pixels, as a run's generate.height."""

    width: Annotated[PositiveInt | None, PIXELS] = None
    """Width of images in pixels."""

    frames: Annotated[PositiveInt | None, FRAMES] = None
    """Frames of clips."""

    rewards: Annotated[
        Listed,
        Field(min_length=1),
        names_differ("rewards", lambda text: _parse_reward(text)[0], "each once, here or at one server"),
    ] = ("clipscore",)
    """Rewards to load, by name or package.module:attribute, with @http://… if a reward server computes it."""

    reward_options: Annotated[dict[str, dict[str, Any]], JSON_OPTION] = Field(default_factory=dict)
    """Options of rewards, as a run's; for a reward server at, timeout and batch_size.
    Without a dtype, weights are bfloat16 on a GPU, and of each reward's own on a CPU.
    For example '{"hpsv2": {"checkpoint": "/models/HPS_v2.1_compressed.pt", "dtype": "bfloat16"}}'."""

    reward_hosts: Annotated[Listed, tyro.conf.arg(help_behavior_hint="(default: none)")] = ()
    """Addresses of reward servers that requests may name, each http(s)://HOST:PORT. They get no token."""

    redis_url: Annotated[str | None, tyro.conf.arg(metavar="URL", help_behavior_hint="(default: in this process)")] = (
        None
    )
    """Redis that stores adapters for all replicas."""

    redis_url_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """File with the Redis URL, for one with a password: other users can read a command line. Overrides redis_url."""


class RolloutSettings(HttpSettings, Hosting):
    """Settings of one service process; flags take precedence over the environment."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "models": (
            *("model", "device", "gpus", "workers", "engine", "engine_options", "precision", "emulate"),
            *("height", "width", "frames"),
        ),
        "rewards": ("rewards", "reward_options", "reward_hosts"),
        "access": ACCESS,
        "store": ("redis_url", "redis_url_file", "retain"),
    }

    queue_limit: Annotated[int, Field(ge=1)] = 65536
    """Maximum number of waiting candidates; further requests get 429."""

    scoring_in_flight: Annotated[int, Field(ge=1)] = 4
    """Chunks per worker that may wait for reward servers, and for each of reward_hosts; then it skips such runs."""

    max_adapter_bytes: Annotated[int, Field(ge=1)] = 512 * MIB
    """Largest adapter file, in bytes."""

    max_queued_adapter_bytes: Annotated[int, Field(ge=1)] = 4096 * MIB
    """Maximum bytes of the adapters of accepted requests, each counted once; further requests get 503."""

    retain: Annotated[int, Field(ge=1)] = DEFAULT_RETAIN
    """Number of adapter versions kept per run."""

    live_timeout: Annotated[float, Field(gt=0)] = 30.0
    """Most seconds of a worker's response to /health/live, between two steps; one of several workers is replaced after
    twice as long."""

    tenant_queue_limit: Annotated[
        Annotated[int, Field(ge=1)] | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: queue_limit)")
    ] = None
    """Maximum number of waiting candidates of one tenant."""

    tenant_adapter_bytes: Annotated[
        Annotated[int, Field(ge=1)] | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: no limit)")
    ] = None
    """Maximum bytes of one tenant's adapters in the store."""

    @cached_property
    def store_url(self) -> str | None:
        """The Redis URL, from its file if there is one; OSError or TextFileError if that cannot be read."""
        if self.redis_url_file is None:
            return self.redis_url
        with naming(f"--redis-url-file {self.redis_url_file}", "a file with Redis' URL, which this user may read"):
            return read_text(self.redis_url_file).strip()

    @property
    def on_ray(self) -> bool:
        """Whether the workers are actors of a Ray cluster."""
        return isinstance(self.workers, str)

    @property
    def worker_number(self) -> int | None:
        """Number of workers in `workers`; None for one on each GPU of the Ray cluster."""
        if isinstance(self.workers, int):
            return self.workers
        number = self.workers.partition(":")[2]
        return int(number) if number else None

    @property
    def torch_device(self) -> str:
        return resolve_device(self.device)

    @property
    def most_queued(self) -> int:
        """Maximum number of waiting candidates of one tenant, and so of one request."""
        return min(self.queue_limit, self.tenant_queue_limit or self.queue_limit)

    @property
    def tenant_inflight_bytes(self) -> int:
        """Maximum bytes of one tenant's request bodies, and requested images, in memory."""
        return self.tenant_share(self.max_inflight_bytes, self.max_adapter_bytes, self.max_body_bytes)

    @property
    def tenant_queued_adapter_bytes(self) -> int:
        """Bytes of the adapters that one tenant's requests hold in memory."""
        return self.tenant_share(self.max_queued_adapter_bytes, self.max_adapter_bytes)

    @property
    def models(self) -> list["ModelSpec"]:
        return [parse_model(text) for text in self.model]

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards, without addresses of servers."""
        return tuple(name for name, _ in map(_parse_reward, self.rewards))

    @property
    def dtype_of_rewards(self) -> str | None:
        """Number format of the weights of rewards whose options give none; None for each reward's own."""
        return "bfloat16" if self.torch_device.startswith("cuda") else None

    @property
    def options_of_rewards(self) -> dict[str, dict[str, Any]]:
        """Reward → options, with the addresses in `rewards`."""
        by_reward = {name: dict(options) for name, options in self.reward_options.items()}
        for name, at in map(_parse_reward, self.rewards):
            if at:
                by_reward.setdefault(name, {})["at"] = at
        return by_reward

    @model_validator(mode="after")
    def _largest_bodies_fit(self) -> Self:
        require_within(
            self,
            ("max_adapter_bytes", "max_inflight_bytes"),
            ("max_body_bytes", "max_inflight_bytes"),
            ("max_adapter_bytes", "max_queued_adapter_bytes"),
        )
        return self

    @field_validator("gpus", mode="after")
    @classmethod
    def _gpus_are_listed(cls, value: str | None) -> str | None:
        numbers = [] if value in (None, "all") else str(value).split(",")
        if not all(number.isdecimal() for number in numbers) or len(set(map(int, numbers))) < len(numbers):
            raise ValueError(f"got gpus {value!r}; expected all, or different numbers as in 0,1,3")
        return value

    @field_validator("workers", mode="before")
    @classmethod
    def _workers_are_a_number_or_ray(cls, value: Any) -> Any:
        if not re.fullmatch("[1-9][0-9]*|ray(:[1-9][0-9]*)?", str(value)):
            raise ValueError(f"got workers {value!r}; expected a number of processes, ray, or ray:N")
        return value if str(value).startswith("ray") else int(value)

    @model_validator(mode="after")
    def _one_way_to_choose_devices(self) -> Self:
        if self.gpus is not None and self.workers != 1:
            raise ValueError(
                f"got gpus {self.gpus} and workers {self.workers}; expected one of them: each GPU has one worker"
            )
        if self.on_ray and self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"got workers {self.workers} and device {self.device}; expected auto, cpu or cuda: Ray assigns the GPUs"
            )
        if self.gpus is not None and self.device not in ("auto", "cuda"):
            raise ValueError(f"got gpus {self.gpus} and device {self.device}; expected gpus, or one device")
        return self

    @field_validator("reward_hosts", mode="after")
    @classmethod
    def _hosts_are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(origin(url, "address in reward_hosts") for url in value))
