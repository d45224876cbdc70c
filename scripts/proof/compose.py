"""Reader for docker-compose.yml, which replaces variables as the Compose specification says."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?-)((?:[^{}]|\{[^{}]*\})*))?\})")


def load(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Load the file and replace its variables. A container's variable without a value is passed on if it is set."""
    replaced = _replace(yaml.safe_load(path.read_text()), environment)
    assert isinstance(replaced, dict)
    for body in replaced["services"].values():
        given: dict[str, str | None] = body.get("environment", {})
        passed = {name: environment.get(name) if value is None else value for name, value in given.items()}
        body["environment"] = {name: value for name, value in passed.items() if value is not None}
    return replaced


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
