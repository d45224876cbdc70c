"""Presets `<model>/<recipe>/<reward>`, composed from the files in `settings/models` and `settings/recipes`.

Later layers override earlier ones: field defaults, model, recipe, recipe for the model, reward, YAML files in their
order, `--set key=value`. The source of every value is recorded for a dry run. A recipe's file names models with equal
settings together: `wan, wan-14b:`.
"""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from solrl_core.reward_registry import REWARDS
from solrl_core.suggestions import did_you_mean
from solrl_proto.identifiers import NAME_PATTERN, NAME_RULE
from solrl_proto.printable import printable
from solrl_proto.text_files import decode_text, read_text

from solrl_trainer.algorithms.algorithm import AlgorithmSettings
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.defaults import DEFAULT_PRESET
from solrl_trainer.settings.yaml_text import LONGEST, YamlError, parse_yaml

logger = logging.getLogger(__name__)
Part = TypeVar("Part")
Layer = tuple[str, Mapping[str, Any]]
"""(source, dotted key → value)."""

_FOLDER = Path(__file__).parent
_LONGEST_SHOWN = 200
"""Characters of a value that an error shows."""


@dataclass(frozen=True)
class Recipe:
    """An algorithm in one or two stages, as its file says.

    Attributes:
        description: in a few words.
        settings: dotted key → value.
        models: model → settings for this pair: as in the papers' code, or scaled to the miniatures.
    """

    description: str
    settings: dict[str, Any]
    models: dict[str, dict[str, Any]]


def _read(folder: str) -> dict[str, dict[str, Any]]:
    return {path.stem: parse_yaml(read_text(path))[0] for path in sorted((_FOLDER / folder).glob("*.yaml"))}


def _fields() -> list[str]:
    keys = []
    for name, info in RunConfig.model_fields.items():
        inner = getattr(info.annotation, "model_fields", None)
        keys += [f"{name}.{key}" for key in inner] if inner else [name]
    return keys


_FIELDS = frozenset(_fields())
"""Dotted keys of all settings, except single algorithms' settings."""


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and prefix + key not in _FIELDS:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


MODELS = {name: _flatten(content) for name, content in _read("models").items()}
"""Model → settings."""
RECIPES = {
    name: Recipe(
        content["description"],
        _flatten(content.get("settings", {})),
        {
            model: _flatten(settings)
            for models, settings in content.get("models", {}).items()
            for model in models.split(", ")
        },
    )
    for name, content in _read("recipes").items()
}
_REWARD_WORDS = {
    "clipscore": "CLIP similarity of image and prompt",
    "pickscore": "human preference: PickScore",
    "hpsv2": "human preference: HPS v2.1",
    "hpsv3": "human preference: HPSv3, by a Qwen2-VL of 7.7 billion weights",
    "imagereward": "human preference: ImageReward",
    "aesthetic": "the image alone: LAION's aesthetic predictor",
    "geneval": "objects, counts, colours and places of GenEval's prompts, by a detector",
    "ocr": "rendered text that RapidOCR reads; needs solrl[ocr]",
    "motion": "how much a clip moves",
    "vlm_judge": "answers of a vision language model; needs reward_options",
    "judge": "miniatures: images and prompts, by a small network",
    "verifier": "miniatures: 1 if all of a prompt's objects are right",
    "verifier_graded": "miniatures: share of a prompt's objects that are right",
    "motion_verifier": "miniature clips: 1 if all of a prompt's objects and motions are right",
    "motion_verifier_graded": "miniature clips: share of a prompt's objects and motions that are right",
}


class ConfigError(ValueError):
    """An invalid setting; the text names it and the valid choices."""


@dataclass(frozen=True)
class Resolved:
    """A run's settings and their sources (dotted key → layer)."""

    config: RunConfig
    sources: dict[str, str]


def print_presets() -> None:
    """Print a table of the parts of a preset's name."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    models = {name: str(settings["model"]) for name, settings in MODELS.items()}
    recipes = {name: recipe.description for name, recipe in RECIPES.items()}
    words = {name: "miniature, runs on a CPU" if model == name else model for name, model in models.items()}
    scores = _REWARD_WORDS | {name: "of another package" for name in REWARDS.names() if name not in _REWARD_WORDS}
    print(f"A preset is <model>/<recipe>/<reward>, as in {DEFAULT_PRESET}")
    # A table for each part: long names of recipes must not fold the names of models.
    for part, rows in (("<model>", words), ("<recipe>", recipes), ("<reward>", scores)):
        table = Table(box=box.SIMPLE_HEAD, show_header=part == "<model>", show_edge=False, padding=(0, 1, 0, 0))
        for column in ("part", "name", "stands for"):
            table.add_column(column)
        table.columns[2].overflow = "fold"
        for row, (name, meaning) in enumerate(rows.items()):
            table.add_row("" if row else part, name, meaning)
        Console(markup=False).print(table)
        print()
    print("A <reward> may also be package.module:attribute. Sums: --set 'rewards={clipscore: 1, hpsv2: 0.5}'")


def _pick(table: Mapping[str, Part], kind: str, name: str) -> Part:
    if name not in table:
        raise ConfigError(f"got {kind} {name!r}{did_you_mean(name, table)}; expected one of {sorted(table)}")
    return table[name]


def resolve(
    preset: str,
    *,
    overrides: Sequence[str] = (),
    files: Mapping[str, Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Resolved:
    """Compose a run's settings.

    Args:
        preset: `<model>/<recipe>/<reward>`; the reward is a registered name or `package.module:attribute`.
        overrides: `key=value` strings, the value in YAML.
        files: contents of YAML files by name, nested or dotted; later ones win.
        arguments: dotted settings from the command line's own options.

    Raises:
        ConfigError: unknown preset or key, or an invalid value.
    """
    parts = preset.split("/")
    if len(parts) != 3:
        raise ConfigError(f"got preset {preset!r}; expected <model>/<recipe>/<reward>, e.g. {DEFAULT_PRESET}")
    model, name, reward = parts
    recipe, settings = _pick(RECIPES, "recipe", name), _pick(MODELS, "model", model)
    try:
        REWARDS.check(reward)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    layers: list[Layer] = [
        ("preset", {"preset": preset, "run": "preset"}),
        (f"model {model}", settings),
        (f"recipe {name}", recipe.settings),
        (f"recipe {name} for {model}", recipe.models.get(model, {})),
        (f"reward {reward}", {"rewards": {reward: 1.0}}),
    ]
    users = _user_layers(overrides, files, arguments)
    resolved = _compose([*_without_other_algorithm(layers, users), *users])
    trained_on = recipe.settings.get("regenerate.at")
    if trained_on == "none" and (at := resolved.config.regenerate.at) != "none":
        # Otherwise naive_quant, say, would train on BF16 images under its own name.
        regenerating = two_stage if (two_stage := f"{name}_two_stage") in RECIPES else "sol_rl"
        raise ConfigError(
            f"got regenerate.at={at} from {resolved.sources['regenerate.at']} for recipe {name}, which trains on the "
            f"candidates themselves; expected regenerate.at=none, or recipe {regenerating}"
        )
    return resolved


def resolve_again(
    saved: RunConfig,
    *,
    overrides: Sequence[str] = (),
    files: Mapping[str, Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Resolved:
    """A continued run's saved settings, changed by the arguments. ConfigError: an unknown key, or an invalid value."""
    source = str(saved.output / "config.json")
    layer = _flatten(saved.model_dump(mode="json"))
    return _compose([(source, layer), *_user_layers(overrides, files, arguments)])


def _user_layers(
    overrides: Sequence[str], files: Mapping[str, Mapping[str, Any]] | None, arguments: Mapping[str, Any] | None
) -> list[Layer]:
    layers: list[Layer] = []
    for name, content in (files or {}).items():
        lines = content.lines if isinstance(content, SettingsFile) else {}
        layers += [
            (f"{name}:{lines[key]}" if key in lines else name, {key: value}) for key, value in _flatten(content).items()
        ]
    layers.append(("--set", dict(parse_override(override) for override in overrides)))
    layers.append(("command line", {k: v for k, v in (arguments or {}).items() if v is not None}))
    return layers


def _compose(layers: Sequence[Layer]) -> Resolved:
    names = {*_FIELDS, *(f"algorithm.{key}" for key in _algorithm_settings(layers).model_fields)}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        for key, value in layer.items():
            if key not in names:
                raise _unknown(key, names, source)
            values[key], sources[key] = value, source
    if "output" not in values:
        values["output"], sources["output"] = f"runs/{values['run']}", "run"
    try:
        config = RunConfig.model_validate(_nest(values))
    except ValidationError as error:
        raise config_error(error, sources) from error
    if sources["run"] == "preset":
        run = _default_run(config)
        output = Path("runs", run) if sources["output"] == "run" else config.output
        config = config.model_copy(update={"run": run, "output": output})
    if values.get("explore.lag") is None:
        sources["explore.lag"] = "rollout_url"
    return Resolved(config, {key: sources.get(key, "default") for key in sorted(names)})


def _default_run(config: RunConfig) -> str:
    """Name of a run after its preset's model and recipe and the rewards that it trains."""
    model, recipe, _ = config.preset.split("/")
    name = "-".join((model, recipe, *config.weights)).lower()
    return re.sub(r"[^a-z0-9._-]", "-", name)[:64].rstrip("._-")


def _unknown(key: str, names: Collection[str], source: str) -> ConfigError:
    if section := sorted(name for name in names if name.startswith(f"{key}.")):
        return ConfigError(f"got setting {key!r} from {source}, which is a section; expected one of {section}")
    owners = _algorithms_with(key.removeprefix("algorithm.")) if key.startswith("algorithm.") else []
    hint = f" with this algorithm.name, only with {' and '.join(owners)}" if owners else did_you_mean(key, names)
    return ConfigError(
        f"got setting {key!r} from {source}, which does not exist{hint}; "
        "`solrl-train run --dry-run` prints all settings"
    )


def _algorithms_with(setting: str) -> list[str]:
    """Names of the loadable algorithms that have this setting."""
    owners = []
    for name in ALGORITHMS.names():
        with suppress(ValueError):
            if setting in ALGORITHMS.find(name).Settings.model_fields:
                owners.append(name)
    return owners


class SettingsFile(dict[str, Any]):
    """The settings of a YAML file, with the line of each dotted name."""

    lines: Mapping[str, int]


def read_settings_file(path: Path) -> SettingsFile:
    """The content of a YAML file of settings; an empty one is an empty mapping.

    A ConfigError names the file, and the line of what is not YAML or there twice; a TextFileError says it is not UTF-8.
    """
    try:
        with path.open("rb") as file:  # a device or pipe may have no end
            content = file.read(LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; expected a YAML file with settings") from error
    if len(content) > LONGEST:
        raise ConfigError(f"{path} has more than {LONGEST:,} bytes; expected a YAML file with settings")
    try:
        value, lines = parse_yaml(decode_text(content, path))
    except YamlError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error
    if not isinstance(value, dict | None):
        raise ConfigError(f"{path} contains a {type(value).__name__}; expected a mapping of settings")
    settings = SettingsFile(value or {})
    settings.lines = lines
    return settings


def config_error(error: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    """ConfigError for the first validation error, with the setting's source; `sources` maps dotted key → layer."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    # The location may be inside a setting (an item of a list), or a whole section.
    layers = [source for name, source in sources.items() if f"{key}.".startswith(f"{name}.")]
    layers = layers or [source for name, source in sources.items() if name.startswith(f"{key}.")]
    source = ", ".join(dict.fromkeys(layers)) or "defaults"
    # A rollout URL may be refused for the password in it. A fault between a section's settings names the settings.
    between = first["type"] == "value_error" and isinstance(first["input"], Mapping)
    got = "" if key == "rollout_url" or between else f"got {_quote(first['input'])}; "
    place = f"setting {key} (from {source})" if key else "settings"
    quoted = ": write it in quotes" if first["type"] == "string_type" and not isinstance(first["input"], dict) else ""
    is_name = first["type"] == "string_pattern_mismatch" and first["ctx"]["pattern"] == NAME_PATTERN
    message = f"expected a name of {NAME_RULE}" if is_name else first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{place}: {got}{message}{quoted}")


def parse_override(override: str) -> tuple[str, Any]:
    """Parse `key=value`, with the value in YAML; ConfigError if it is invalid."""
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"got --set {_quote(override)}; expected key=value")
    try:
        parsed, _ = parse_yaml(value)
    except YamlError as error:
        raise ConfigError(f"got --set {_quote(override)}; expected a value in YAML ({error})") from error
    if isinstance(parsed, dict) and any(":" in name and item is None for name, item in parsed.items()):
        raise ConfigError(f"got --set {_quote(override)}; expected a space after each colon, and quotes around it all")
    return key.strip(), parsed


def _quote(value: Any) -> str:
    return printable(repr(value), _LONGEST_SHOWN)


def _without_other_algorithm(preset: Sequence[Layer], users: Sequence[Layer]) -> list[Layer]:
    """The preset's layers without the settings of its algorithm that the user's algorithm does not share.

    Algorithms share a setting if both inherit it from one class: a name alone may mean something else, as `beta` does.
    """
    before, after = _algorithm_settings(preset), _algorithm_settings([*preset, *users])
    common = [kind for kind in before.__mro__ if kind in after.__mro__ and issubclass(kind, AlgorithmSettings)]
    foreign = before.model_fields.keys() - {key for kind in common for key in kind.model_fields}
    layers: list[Layer] = []
    for source, layer in preset:
        if dropped := layer.keys() & {f"algorithm.{key}" for key in foreign}:
            logger.warning(
                f"{source}: {', '.join(sorted(dropped))} belong to its own algorithm, not to the algorithm.name that "
                "you chose, and are left out"
            )
        layers.append((source, {key: value for key, value in layer.items() if key not in dropped}))
    return layers


def _algorithm_settings(layers: Sequence[Layer]) -> type[AlgorithmSettings]:
    """Class of the settings of the algorithm that the last layer with `algorithm.name` selects."""
    named = [(source, layer["algorithm.name"]) for source, layer in layers if "algorithm.name" in layer]
    source, name = named[-1] if named else ("default", AlgorithmSettings().name)
    try:
        settings: type[AlgorithmSettings] = ALGORITHMS.find(str(name)).Settings
    except ValueError as error:
        raise ConfigError(f"setting algorithm.name (from {source}): {error}") from error
    return settings


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, dot, name = key.partition(".")
        if dot:
            nested.setdefault(section, {})[name] = value
        else:
            nested[key] = value
    return nested
