"""Presets `<model>/<recipe>/<reward>`, composed from three small tables.

Later layers override earlier ones: field defaults, model, recipe, reward, a YAML file, `--set key=value`. The source of
every value is recorded for a dry run.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from solrl_trainer.algorithms.base import AlgorithmSettings
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.config import RunConfig

_MINIATURE = {
    "prompts": "shapes",
    "iterations": 40,
    "explore.prompts": 12,
    "optimizer.learning_rate": 1e-3,
    "optimizer.updates": 6,
    "optimizer.batch": 48,
    "evaluate.steps": 10,
    "evaluate.rewards": ("verifier", "verifier_graded"),
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"model": name, **_MINIATURE} for name in ("mini-sana", "mini-sd3", "mini-flux")},
    "sana": {
        "model": "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
        "prompts": "prompts",
        "optimizer.batch": 16,
    },
    "sd3": {
        "model": "stabilityai/stable-diffusion-3.5-large",
        "prompts": "prompts",
        "solver": "dpm2",
        "optimizer.batch": 4,
        "optimizer.checkpointing": True,
        "optimizer.max_grad_norm": 0.002,
    },
    "flux1": {
        "model": "black-forest-labs/FLUX.1-dev",
        "prompts": "prompts",
        "solver": "dpm2",
        "optimizer.batch": 12,
        "optimizer.checkpointing": True,
        "algorithm.timestep_fraction": 0.4,
        "evaluate.steps": 28,
    },
}
_LOCAL = {"explore.source": "local", "explore.steps": 10}
RECIPES: dict[str, dict[str, Any]] = {
    "diffusionnft": {**_LOCAL, "explore.precision": "bf16", "explore.candidates": 24},
    "naive_scaling": {**_LOCAL, "explore.precision": "bf16"},
    "naive_quant": {**_LOCAL, "explore.precision": "nvfp4"},
    "sol_rl": {},
}
REWARDS: dict[str, dict[str, Any]] = {
    name: {"rewards": {name: 1.0}} for name in ("clipscore", "pickscore", "hpsv2", "imagereward")
}


class ConfigError(ValueError):
    """An invalid setting; the text names it and the valid choices."""


@dataclass(frozen=True)
class Resolved:
    """A run's settings and their sources (dotted key → layer)."""

    config: RunConfig
    sources: dict[str, str]


def names() -> list[str]:
    """Names of all presets."""
    return [f"{m}/{r}/{w}" for m in MODELS for r in RECIPES for w in REWARDS]


def _pick(table: Mapping[str, dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    if name not in table:
        raise ConfigError(f"got {kind} {name!r}{_near(name, table)}; expected one of {sorted(table)}")
    return table[name]


def _near(name: str, choices: Any) -> str:
    close = difflib.get_close_matches(name, list(choices), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def resolve(
    preset: str,
    *,
    overrides: Sequence[str] = (),
    file: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Resolved:
    """Compose a run's settings.

    Args:
        preset: `<model>/<recipe>/<reward>`.
        overrides: `key=value` strings, the value in YAML.
        file: a YAML file's content, nested or dotted.
        arguments: dotted settings from the command line's own options.

    Raises:
        ConfigError: unknown preset or key, or an invalid value.
    """
    if file is not None and not isinstance(file, Mapping):
        raise ConfigError(f"got a settings file that holds a {type(file).__name__}; expected a mapping of settings")
    parts = preset.split("/")
    if len(parts) != 3:
        raise ConfigError(f"got preset {preset!r}; expected <model>/<recipe>/<reward>, e.g. mini-sana/sol_rl/clipscore")
    model, recipe, reward = parts
    layers: list[tuple[str, Mapping[str, Any]]] = [
        (f"model {model}", _pick(MODELS, "model", model)),
        (f"recipe {recipe}", _pick(RECIPES, "recipe", recipe)),
        (f"reward {reward}", _pick(REWARDS, "reward", reward)),
        ("file", _flatten(file or {}, set(_flatten_fields()))),
        ("--set", dict(parse_override(override) for override in overrides)),
        ("command line", {k: v for k, v in (arguments or {}).items() if v is not None}),
    ]
    known = {*_flatten_fields(), *_algorithm_fields(layers)}
    values: dict[str, Any] = {"preset": preset, "run": preset.replace("/", "-"), "output": "runs/" + parts[0]}
    sources = dict.fromkeys(values, "preset")
    for source, layer in layers:
        for key, value in layer.items():
            if key not in known:
                choices = ", ".join(sorted(known))
                raise ConfigError(f"got setting {key!r}{_near(key, known)}; expected one of: {choices}")
            values[key], sources[key] = value, source
    try:
        config = RunConfig.model_validate(_nest(values))
    except ValidationError as error:
        raise refused(error, sources) from error
    return Resolved(config, {key: sources.get(key, "default") for key in sorted(known)})


def refused(error: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    """ConfigError for the first validation error, with the setting's source; `sources` maps dotted key → layer."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    # The location may be inside a setting (an item of a list), or a whole section.
    given = [source for name, source in sources.items() if f"{key}.".startswith(f"{name}.")]
    given = given or [source for name, source in sources.items() if name.startswith(f"{key}.")]
    source = ", ".join(dict.fromkeys(given)) or "defaults"
    # A rollout URL may be refused for the password in it.
    got = "" if key == "rollout_url" else f"got {first['input']!r}; "
    return ConfigError(f"setting {key} (from {source}): {got}{first['msg']}")


def parse_override(override: str) -> tuple[str, Any]:
    """Parse `key=value`, with the value in YAML; ConfigError if it is invalid."""
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"got --set {override!r}; expected key=value")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"got --set {override!r}; expected a value in YAML ({error})") from error


def _flatten(values: Mapping[str, Any], known: set[str], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and prefix + key not in known:
            flat |= _flatten(value, known, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _flatten_fields() -> list[str]:
    keys = []
    for name, info in RunConfig.model_fields.items():
        section = info.annotation
        inner = getattr(section, "model_fields", None)
        keys += [f"{name}.{key}" for key in inner] if inner else [name]
    return keys


def _algorithm_fields(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Settings of the algorithm that the last layer with `algorithm.name` selects."""
    named = [(source, layer["algorithm.name"]) for source, layer in layers if "algorithm.name" in layer]
    source, name = named[-1] if named else ("default", AlgorithmSettings().name)
    try:
        return [f"algorithm.{key}" for key in ALGORITHMS.find(str(name)).Settings.model_fields]
    except ValueError as error:
        raise ConfigError(f"setting algorithm.name (from {source}): {error}") from error


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, dot, name = key.partition(".")
        if dot:
            nested.setdefault(section, {})[name] = value
        else:
            nested[key] = value
    return nested
