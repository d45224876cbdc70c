"""`solrl-rollout doctor`: checks of this machine and the settings, with a remedy for everything that is missing."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from solrl_proto.problems import ProblemError

from solrl_rollout.settings import ModelSpec, Settings

_COLOURS = {"ok": "green", "warn": "yellow", "missing": "red"}


class Finding(NamedTuple):
    """One row of the table."""

    part: str
    state: Literal["ok", "warn", "missing"]
    found: str
    action: str = ""


def examine(settings: Settings) -> int:
    """Print the findings; returns 1 if something required is missing, else 0."""
    findings = [
        *_software(),
        *_devices(settings),
        *(_model(spec) for spec in settings.models),
        *_rewards(settings),
        *redis_findings(settings.store_url),
        *_access(settings),
        _port(settings),
    ]
    table = Table("part", "state", title="solrl-rollout doctor", title_justify="left")
    for column in ("found", "what to do"):
        table.add_column(column, overflow="fold")
    for part, state, found, action in findings:
        table.add_row(part, f"[{_COLOURS[state]}]{state}[/]", found, action)
    Console().print(table)
    return int(any(finding.state == "missing" for finding in findings))


def _software() -> Iterator[Finding]:
    import torch

    yield Finding("python", "ok", platform.python_version())
    yield Finding("torch", "ok", torch.__version__)


def _devices(settings: Settings) -> Iterator[Finding]:
    import torch
    from solrl_core.precision import PRECISIONS, engine_version, fastest_tier, probe

    count = torch.cuda.device_count()
    for i in range(count):
        major, minor = torch.cuda.get_device_capability(i)
        found = f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"
        yield Finding(f"cuda:{i}", "ok", found)
    if not count:
        wanted = settings.device.startswith("cuda")
        action = "install a CUDA build of torch and a driver, or use --device cpu" if wanted else ""
        yield Finding("cuda", "missing" if wanted else "ok", "no device; runs on the CPU", action)
    on_cuda = count > 0 and settings.device != "cpu"
    device = torch.device("cuda" if on_cuda else "cpu")
    for tier in PRECISIONS:
        numerics, how = probe(tier, device)
        yield Finding(f"tier {tier}", "ok", f"{numerics}: {how}" if numerics else how)
    try:
        version = engine_version()
        yield Finding(
            "transformer engine", "ok", version or "not installed; native nvfp4 needs it, and a Blackwell GPU"
        )
    except ValueError as error:
        action = "rebuild it for this torch and CUDA; until then nvfp4 is emulated"
        yield Finding("transformer engine", "warn", str(error), action)
    yield Finding("precision auto", "ok", fastest_tier(device) if settings.precision == "auto" else settings.precision)


def _model(spec: ModelSpec) -> Finding:
    from solrl_core.families.load import FAMILIES, locate

    try:
        where = locate(spec.location)
    except ValueError as error:
        return Finding("model", "missing", str(error), "correct --model")
    if not Path(where).is_dir():
        return _hub_model(where, spec.revision)
    try:
        index = json.loads(Path(where, "model_index.json").read_text())
        parts = [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]
    except (OSError, ValueError, IndexError, AttributeError) as error:
        return Finding("model", "missing", f"{where}: {error}", "give a folder in diffusers format")
    if index.get("_class_name") not in FAMILIES:
        found = f"{where} is a {index.get('_class_name')}"
        return Finding("model", "missing", found, f"use a model of {', '.join(FAMILIES.names())}")
    lacking = [part for part in parts if not any(Path(where, part).glob("*"))]
    if lacking:
        return Finding("model", "missing", f"{where} lacks {', '.join(lacking)}", "copy the whole folder")
    return Finding("model", "ok", f"{spec.name} in {where}")


def _hub_model(where: str, revision: str | None) -> Finding:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(where, "model_index.json", revision=revision)
    except HFValidationError as error:
        return Finding("model", "missing", str(error), "correct --model")
    if isinstance(cached, str):
        return Finding("model", "ok", f"{where}, in the local hub cache")
    return Finding("model", "warn", f"{where} is not on this machine", "serve downloads it at the start")


def _rewards(settings: Settings) -> Iterator[Finding]:
    from solrl_core.rewards.base import REWARDS

    for name in settings.rewards:
        if name in REWARDS:
            yield Finding(f"reward {name}", "ok", "registered")
        elif ":" in name:
            yield Finding(f"reward {name}", "warn", "serve imports it at the start", "check that it is installed")
        else:
            known = ", ".join(REWARDS.names())
            yield Finding(f"reward {name}", "missing", "not registered", f"use one of {known}")


def redis_findings(url: str | None) -> Iterator[Finding]:
    """Findings on the Redis of the settings, and on its own settings."""
    if url is None:
        yield Finding("adapter store", "ok", "in this process", "give --redis-url to keep and share adapters")
        return
    from redis import Redis
    from redis.exceptions import RedisError

    from solrl_rollout.store.redis import CHECKED_SETTINGS, weaknesses

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
            held = {str(name): value for name, value in client.config_get(*CHECKED_SETTINGS).items()}
        except RedisError as error:
            yield Finding("redis settings", "warn", f"cannot be read: {error}", "check them yourself")
            return
    warnings = [text.rpartition("; ") for text in weaknesses(held)]
    for found, _, action in warnings:
        yield Finding("redis settings", "warn", found, action)
    if not warnings:
        yield Finding("redis settings", "ok", ", ".join(f"{name} {value}" for name, value in held.items()))


def _access(settings: Settings) -> Iterator[Finding]:
    from solrl_rollout.http.tokens import TokenFileError, read_tokens
    from solrl_rollout.serve import check_exposure

    path = settings.token_file
    if path is None:
        try:
            check_exposure(settings)
        except ProblemError as error:
            yield Finding("access", "missing", error.problem.detail, error.problem.action or "")
        else:
            if settings.allow_anonymous:
                yield Finding(
                    "access", "warn", "no tokens: anyone who can reach the address can do anything", "--token-file"
                )
            else:
                yield Finding("access", "ok", "no tokens: this machine alone is served")
        return
    try:
        tokens = read_tokens(path)
    except TokenFileError as error:
        yield Finding("access", "missing", str(error), "give a file of `solrl-rollout token create`")
        return
    valid = [token for token in tokens if not token.expired]
    found = f"{len(valid)} valid tokens of {len({token.tenant for token in valid})} tenants in {path}"
    yield Finding("access", "ok" if valid else "warn", found, "" if valid else "make one: solrl-rollout token create")
    if path.stat().st_mode & 0o022:
        yield Finding("token file", "warn", f"others may write {path}, and so let themselves in", f"chmod 600 {path}")


def _port(settings: Settings) -> Finding:
    from solrl_rollout.serve import bind

    try:
        bind(settings.host, settings.port).close()
    except ProblemError as error:
        return Finding("port", "missing", error.problem.detail, error.problem.action or "")
    return Finding("port", "ok", f"{settings.host}:{settings.port} is free")
