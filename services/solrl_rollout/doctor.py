"""`solrl-rollout doctor`: checks of this machine and the settings, with a remedy for everything that is missing."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from solrl_core import diagnosis
from solrl_core.diagnosis import Finding
from solrl_core.model_options import ImageSize
from solrl_core.rewards.reward import AT
from solrl_http.doctor import access_rows, port_row

from solrl_rollout.settings import RolloutSettings

_REDIS_SETTINGS = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync")


def check(settings: RolloutSettings) -> Iterator[Finding]:
    """Findings about everything that a service with these settings needs."""
    # On Ray, the device is another machine's.
    yield from diagnosis.machine("auto" if settings.on_ray else settings.device, settings.precision)
    yield _workers(settings)
    yield from _engine(settings)
    for spec in settings.models:
        yield diagnosis.model(spec.location, revision=spec.revision)
    device = torch.device(settings.torch_device)
    # A GPU that is missing is a finding about the machine.
    if not settings.on_ray and device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        yield from memory_findings(settings, torch.cuda.get_device_properties(device).total_memory)
    yield from dict.fromkeys(_rewards(settings))  # models with the same options have the same findings
    yield from redis_findings(settings.store_url)
    yield from (Finding(*row) for row in (*access_rows(settings), port_row(settings)))


def memory_findings(settings: RolloutSettings, capacity: int) -> Iterator[Finding]:
    """Whether the models fit together on a device of `capacity` bytes, by plan; nothing if a model cannot be read."""
    from solrl_core.families.skeleton import load_skeleton
    from solrl_core.memory_plan import RESERVED, bytes_text, plan_memory
    from solrl_core.precision.support import fastest_precision

    device = torch.device(settings.torch_device)
    precision = fastest_precision(device) if settings.precision == "auto" else settings.precision
    size = ImageSize(settings.height, settings.width, settings.frames)
    try:
        models = [load_skeleton(spec.location, revision=spec.revision, size=size) for spec in settings.models]
    except (ValueError, OSError):
        return  # the finding about the model has the reason
    required = sum(plan_memory(model, [precision], 1).total for model in models)
    summary = f"{bytes_text(required)} by plan at {precision}, of {bytes_text(capacity)}; rewards and BF16 come on top"
    if required + RESERVED <= capacity:
        yield Finding("memory", "ok", summary)
    else:
        yield Finding("memory", "missing", summary, "host fewer models; `solrl-rollout memory` plans each")


def _engine(settings: RolloutSettings) -> Iterator[Finding]:
    if settings.engine != "vllm-omni":
        return
    from solrl_rollout.engine.backends.vllm_omni.support import VERSIONS, require_packages

    try:
        require_packages()
    except RuntimeError as error:
        fault, _, action = str(error).partition(": ")
        yield Finding("engine", "missing", fault, action)
    else:
        yield Finding("engine", "ok", " and ".join(f"{name} {version}" for name, version in VERSIONS.items()))


def _rewards(settings: RolloutSettings) -> Iterator[Finding]:
    options = settings.options_of_rewards
    ask = cache(lambda name: tuple(_of_server(name, options[name])))
    for spec in settings.models:
        yield from diagnosis.rewards(
            settings.reward_names,
            spec.location,
            revision=spec.revision,
            options=options,
            ask=ask,
        )


def _of_server(name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about a reward's server: whether it answers, computes the reward, and the reward's digest."""
    from solrl_core.errors import RewardUnavailableError
    from solrl_proto.printable import printable
    from solrl_remote.remote_reward import NotServedError, connect_reward

    at = printable(str(options[AT]))
    server, reward = f"reward server {at}", f"reward {name}"
    try:
        connected = connect_reward(name, options)
    except RewardUnavailableError as error:
        action = f"start it there: solrl-reward serve --rewards {name}; or correct its address in --rewards"
        yield Finding(server, "missing", str(error), action)
    except NotServedError as error:
        fault, _, action = str(error).partition("; ")
        yield Finding(server, "ok", "answers")
        yield Finding(reward, "missing", fault, action)
    except ValueError as error:
        yield Finding(reward, "missing", str(error))
    else:
        yield Finding(server, "ok", "answers")
        yield Finding(reward, "ok", f"computed by the server at {at}, digest {connected.digest}")
        if connected.advice:
            warning, _, action = connected.advice.rpartition(": ")
            yield Finding(f"{reward}'s timeout", "warn", warning, action)


def _workers(settings: RolloutSettings) -> Finding:
    if settings.on_ray:
        return _actors(settings)
    from solrl_rollout.engine.workers import worker_devices

    try:
        devices = worker_devices(settings)
    except ValueError as error:
        return Finding("workers", "missing", str(error), "correct --device, --gpus or --workers")
    if len(devices) == 1:
        return Finding("workers", "ok", "one, in the service's process")
    return Finding("workers", "ok", f"{len(devices)} processes, on {', '.join(dict.fromkeys(devices))}")


def _actors(settings: RolloutSettings) -> Finding:
    try:
        from solrl_rollout.engine.workers.ray_cluster import RayCluster

        cluster = RayCluster(settings)
    except RuntimeError as error:
        fault, _, action = str(error).partition("; ")
        return Finding("workers", "missing", fault, action)
    summary = f"{cluster.workers} Ray actors, on {cluster.device}, in a cluster of {cluster.nodes} nodes"
    return Finding("workers", "ok", summary)


def redis_findings(url: str | None) -> Iterator[Finding]:
    """Findings on the Redis of the settings, and on its own settings."""
    if url is None:
        yield Finding("adapter store", "ok", "in this process", "give --redis-url to keep and share adapters")
        return
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        client = Redis.from_url(url, socket_connect_timeout=3, socket_timeout=3)
        address = client.connection_pool.connection_kwargs
        where = address.get("path") or f"{address.get('host', 'localhost')}:{address.get('port', 6379)}"
    except (ValueError, TypeError):
        yield Finding("redis", "missing", "the URL cannot be read", "redis://[user:password@]host[:port][/database]")
        return
    with client:
        try:
            client.ping()
        except (RedisError, OSError) as error:
            action = "start Redis there (redis-server), or correct --redis-url"
            yield Finding("redis", "missing", f"{where}: {error}", action)
            return
        yield Finding("redis", "ok", f"{where} answers")
        try:
            values = {str(name): value for name, value in client.config_get(*_REDIS_SETTINGS).items()}
        except RedisError as error:
            yield Finding("redis settings", "warn", f"cannot be read: {error}", "check them yourself")
            return
    warnings = list(_weaknesses(values))
    for weakness, action in warnings:
        yield Finding("redis settings", "warn", weakness, action)
    if not warnings:
        yield Finding("redis settings", "ok", ", ".join(f"{name} {value}" for name, value in values.items()))


def _weaknesses(settings: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    if settings["maxmemory"] != "0" and settings["maxmemory-policy"] != "noeviction":
        yield (
            f"Redis has maxmemory-policy {settings['maxmemory-policy']}, which may evict adapters",
            "set it to noeviction",
        )
    if settings["appendonly"] != "yes":
        weakness = "Redis keeps no append-only file: a restart loses versions, which trainers push again"
        yield weakness, "set appendonly yes"
    elif settings["appendfsync"] == "no":
        weakness = "Redis leaves appendfsync to the system: a crash may lose half a minute"
        yield weakness, "set it to everysec or always"
