"""Reader for the parts of docker-compose.yml that the test uses, following the Compose specification."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

HONOURED = {
    *("profiles", "image", "build", "command", "environment", "user", "secrets", "depends_on", "healthcheck"),
    *("volumes", "stop_grace_period", "cap_drop"),
}
"""Keys of a service that the test implements."""

LEFT_OUT = {"init", "security_opt", "logging", "restart", "ports", "runtime", "shm_size"}
"""Keys that only a container engine implements; the test reports them as not tested."""

_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?-)((?:[^{}]|\{[^{}]*\})*))?\})")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


@dataclass(frozen=True)
class Health:
    """A health check: command to run in the container, its timeout, and the pause between two, in seconds."""

    test: tuple[str, ...]
    timeout: float
    pause: float


@dataclass(frozen=True)
class Service:
    """A service of the file, with variables replaced."""

    name: str
    image: str
    dockerfile: str | None
    build_arguments: dict[str, str]
    command: tuple[str, ...]
    environment: dict[str, str]
    user: str | None
    secrets: dict[str, Path]
    """Path in the container → file on the host."""
    volumes: dict[str, str]
    """Path in the container → named volume."""
    cap_drop: tuple[str, ...]
    depends_on: dict[str, str]
    """Service to wait for → condition."""
    health: Health | None
    grace: float
    left_out: tuple[str, ...]


def load(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Load the file and replace its variables. A container's variable without a value is passed on if it is set."""
    replaced = _replace(yaml.safe_load(path.read_text()), environment)
    assert isinstance(replaced, dict)
    for body in replaced["services"].values():
        given: dict[str, str | None] = body.get("environment", {})
        passed = {name: environment.get(name) if value is None else value for name, value in given.items()}
        body["environment"] = {name: value for name, value in passed.items() if value is not None}
    return replaced


def services(path: Path, profile: str, environment: Mapping[str, str]) -> list[Service]:
    """Services of a profile and those without one, each after those it depends on.

    Raises:
        ValueError: a service has a key that the test neither implements nor may leave out.
    """
    document = load(path, environment)
    chosen = {
        name: _service(name, body, document.get("secrets", {}), path.parent)
        for name, body in document["services"].items()
        if profile in body.get("profiles", [profile])
    }
    order = TopologicalSorter({name: set(service.depends_on) for name, service in chosen.items()}).static_order()
    return [chosen[name] for name in order]


def _service(name: str, body: dict[str, Any], secrets: dict[str, Any], folder: Path) -> Service:
    unknown = body.keys() - HONOURED - LEFT_OUT
    if unknown:
        raise ValueError(f"{name}: got unknown keys {', '.join(sorted(unknown))}; add them to HONOURED or LEFT_OUT")
    build = body.get("build", {})
    mounted = {}
    for entry in body.get("secrets", []):
        source, target = (entry, entry) if isinstance(entry, str) else (entry["source"], entry["target"])
        mounted[f"/run/secrets/{target}"] = folder / secrets[source]["file"]
    return Service(
        name=name,
        image=body["image"],
        dockerfile=build.get("dockerfile"),
        build_arguments=build.get("args", {}),
        command=tuple(body.get("command", ())),
        environment=body["environment"],
        user=body.get("user"),
        secrets=mounted,
        volumes={target: volume for volume, target in (entry.split(":") for entry in body.get("volumes", ()))},
        cap_drop=tuple(body.get("cap_drop", ())),
        depends_on={other: entry["condition"] for other, entry in body.get("depends_on", {}).items()},
        health=_health(body.get("healthcheck")),
        grace=seconds(body.get("stop_grace_period", "10s")),
        left_out=tuple(sorted(body.keys() & LEFT_OUT)),
    )


def _health(body: dict[str, Any] | None) -> Health | None:
    if body is None:
        return None
    kind, *rest = body["test"]
    test = {"CMD": tuple(rest), "CMD-SHELL": ("/bin/sh", "-c", *rest)}[kind]
    return Health(test, seconds(body["timeout"]), seconds(body.get("start_interval", body["interval"])))


def seconds(text: str) -> float:
    """Parse a duration such as 1m30s.

    Raises:
        ValueError: not a duration.
    """
    parts = re.findall(r"(\d+)(ms|[hms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"got {text!r}; expected a duration such as 1m30s")
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


def _replace(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replace(entry, environment) for key, entry in value.items()}
    if isinstance(value, list):
        return [_replace(entry, environment) for entry in value]
    return interpolate(value, environment) if isinstance(value, str) else value


def interpolate(text: str, environment: Mapping[str, str]) -> str:
    """Replace `$$`, `$NAME`, `${NAME}`, `${NAME-default}` and `${NAME:-default}`."""

    def one(found: re.Match[str]) -> str:
        dollar, bare, braced, operator, default = found.groups()
        if dollar:
            return "$"
        value = environment.get(bare or braced)
        if value is None or (operator == ":-" and not value):
            return interpolate(default or "", environment)
        return value

    return _VARIABLE.sub(one, text)
