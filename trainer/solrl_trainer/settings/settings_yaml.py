"""Settings of a run as YAML that `solrl-train run --config` takes."""

from collections.abc import Collection, Iterator

from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.defaults import FIRST_SETTINGS
from solrl_trainer.settings.presets import Resolved
from solrl_trainer.settings.yaml_text import dump_yaml

SETTINGS_YAML = "settings.yaml"
"""File in a run's folder."""

_RUN_SETTINGS = ("run", "output")
"""Settings with another value for every run."""
_FOLLOWING = {"run": "preset", "output": "run", "explore.lag": "rollout_url"}
"""Setting → its source if it follows from another setting."""


def settings_yaml(config: RunConfig, omitted: Collection[str] = _RUN_SETTINGS) -> str:
    """All settings in sections, except the `omitted`; by default for another run with the same settings."""
    return dump_yaml(config.model_dump(mode="json", exclude=set(omitted)))


def sourced_yaml(resolved: Resolved) -> Iterator[str]:
    """All settings under dotted keys, each with its source as a comment; `FIRST_SETTINGS` come first.

    A setting that follows from another is itself a comment, since it would not follow any more.
    """
    values = resolved.config.model_dump(mode="json")
    for key in dict.fromkeys((*FIRST_SETTINGS, *resolved.sources)):
        source = resolved.sources[key]
        section, _, name = key.partition(".")
        value = dump_yaml(values[section][name] if name else values[section], flow=True).strip()
        yield f"{'# ' if _FOLLOWING.get(key) == source else ''}{key}: {value.removesuffix('...').strip()}  # {source}"
