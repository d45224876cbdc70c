"""Changes of a run that is resumed: the rules for them, and the comparison with its checkpoint.

Names of settings are dotted. A part that a run depends on beside its settings is named `kind:part`, for example
`prompts:train`, `model:vae`, `rewards:clipscore`, `algorithm:my_package:MyAlgorithm`, `libraries:torch`.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

from solrl_core.fingerprint import combined_digest, source_digest
from solrl_core.model_options import ModelOptions
from solrl_core.suggestions import did_you_mean

from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.prompts.prompt_sets import prompts_of_run
from solrl_trainer.prompts.stored_files import contents_digest, stored_files
from solrl_trainer.run_folder import checkpoints
from solrl_trainer.run_folder.checkpoints import Checkpoint
from solrl_trainer.run_folder.figures import value_text
from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.config import RunConfig

Rule = Literal["free", "later", "named", "fixed"]
MEANINGS: dict[Rule, str] = {
    "free": "may change: training does not depend on it, except by rounding",
    "later": "may change for later iterations, noted in metrics.jsonl",
    "named": "may change only with `--allow-change NAME`, noted in metrics.jsonl",
    "fixed": "can never change",
}
RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    ("fixed", ("run", "lora.*")),
    ("named", ("algorithm.name",)),
    (
        "free",
        (
            *("iterations", "checkpoint_every", "keep_checkpoints", "evaluate.*", "track", "output", "device"),
            *("rollout_url", "patience", "served_as", "reward_options.*.at", "start_lora"),
            *("optimizer.activation_checkpointing", "optimizer.shard_base", "optimizer.encoders"),
        ),
    ),
    ("later", ("batch", "explore.*", "regenerate.*", "optimizer.*", "algorithm.*", "policy.*")),
)
"""Rules and patterns of names. The first pattern that fits decides; "named" if none does."""
_LIBRARIES = (
    *("solrl", "torch", "triton", "transformer-engine", "diffusers", "transformers", "tokenizers", "sentencepiece"),
    *("peft", "accelerate", "numpy", "pillow", "ftfy", "onnxruntime", "rapidocr"),
)
"""Packages that compute images, scores or weights."""
_KINDS = ("prompts", "model", "rewards", "algorithm", "libraries")
_COMPLETE = ("model", "libraries")
"""Kinds whose part on one side alone is a change. Other parts come and go with settings."""
_SHOWN = 60
"""Characters of a value that an error shows."""


class Change(NamedTuple):
    """A setting or part that differs; a value is None if there is none."""

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {value_text(self.then, _SHOWN)} → {value_text(self.now, _SHOWN)}"

    @property
    def rule(self) -> Rule:
        """How it may change."""
        if self.name == "explore.lag" and self.now > self.then:
            return "fixed"  # checkpoints lack the older versions that a larger lag explores under
        fits = (rule for rule, patterns in RULES if any(fnmatchcase(self.name, pattern) for pattern in patterns))
        return next(fits, "named")


def check_names(names: Collection[str]) -> None:
    """Refuse names of `--allow-change` that no setting or part can have, by a ValueError."""
    heads = {*RunConfig.model_fields, *_KINDS}
    for name in names:
        if (head := name.partition(":")[0].partition(".")[0]) not in heads:
            raise ValueError(
                f"got --allow-change {name}{did_you_mean(head, heads)}; expected a setting, a section of settings, "
                f"or one of {', '.join(_KINDS)}"
            )


def check_before_loading(config: RunConfig, checkpoint: int | None, allowed: Collection[str]) -> None:
    """Check metrics, settings, prompts and libraries of a run that is resumed; `latest` and `check` list the errors."""
    check_names(allowed)
    metrics = config.output / "metrics.jsonl"
    if metrics.is_file():
        read_metrics(metrics)
    if (stored := checkpoints.latest(config.output / "checkpoints", checkpoint)) is not None:
        check(stored, config, parts_before_loading(config), allowed)


def check(stored: Checkpoint, config: RunConfig, parts: Mapping[str, str], allowed: Collection[str]) -> list[Change]:
    """Changes of settings and parts since a checkpoint, except of "free" settings.

    Args:
        parts: `kind:part` → digest or version, as far as known; kinds that the checkpoint lacks are not compared.
        allowed: settings, sections, parts and kinds of parts that may change although they are "named".

    Raises:
        ValueError: another setting or part differs, or the checkpoint has more iterations than asked.
    """
    if config.iterations < stored.version:
        raise ValueError(
            f"{stored.path} has finished {stored.version} iterations, but iterations is {config.iterations}; expected "
            f"at least {stored.version}, or --checkpoint with an earlier version to go back to"
        )
    changes = [change for change in _changes(stored, config, parts) if change.rule != "free"]
    fixed = [change for change in changes if change.rule == "fixed"]
    named = [change for change in changes if change.rule == "named" and not _is_allowed(change.name, allowed)]
    if fixed or named:
        differences = "; ".join(map(str, fixed + named))
        remedies = []
        if fixed:
            names = ", ".join(change.name for change in fixed)
            remedies.append(f"{names} cannot change: start a new run with another --run")
        if named:
            options = " ".join(f"--allow-change {change.name}" for change in named)
            remedies.append(f"Undo what is not meant, and allow the rest by name: {options}")
        raise ValueError(f"{stored.path} is of a run with (stored → asked) {differences}. {'. '.join(remedies)}")
    return changes


def parts_when_loaded(
    config: RunConfig, model: Mapping[str, str], options: ModelOptions, rewards: Mapping[str, str]
) -> dict[str, str]:
    """All parts: parts known before loading, the model's digests, and the rewards' by `reward:<name>`.

    `options` are the model's own, which the image of a prompt and a seed depends on, too.
    """
    # The rewards have digests of their own, and the paths in their options hold on one machine only.
    generation = {name: value for name, value in asdict(options).items() if name != "rewards"}
    of_model = dict(model) | {"solrl.json": combined_digest(json.dumps(generation, sort_keys=True))}
    return (
        parts_before_loading(config)
        | {f"model:{name}": digest for name, digest in of_model.items()}
        | {f"rewards:{name.removeprefix('reward:')}": digest for name, digest in rewards.items()}
    )


def parts_before_loading(config: RunConfig) -> dict[str, str]:
    """Digests of the prompts with metadata, of stored images and of the algorithm's code; versions of the libraries."""
    parts = {}
    for split in ("train", "test"):
        sources = prompts_of_run(config.prompt_sources, split).sources
        for name, prompts in zip(config.prompt_sources, sources, strict=True):
            part = f"prompts:{split}" if name == config.prompts else f"prompts:{split}:{name}"
            content = [prompt.model_dump(mode="json") for prompt in prompts]
            parts[part] = combined_digest(json.dumps(content, sort_keys=True))
    if files := stored_files(config.prompt_sources, config.explore.source):
        parts["prompts:images"] = contents_digest(files)
    name = config.algorithm.name
    if name not in ALGORITHMS.built_in:  # built-in algorithms come with a version of solrl
        parts[f"algorithm:{name}"] = source_digest(ALGORITHMS.find(name))
    return parts | dict(_libraries())


def _libraries() -> Iterator[tuple[str, str]]:
    for name in _LIBRARIES:
        try:
            yield f"libraries:{name}", version(name).partition("+")[0]  # after + is what it was built for
        except PackageNotFoundError:
            continue


def _changes(stored: Checkpoint, config: RunConfig, parts: Mapping[str, str]) -> Iterator[Change]:
    then, now = (dict(_leaves(settings.model_dump(mode="json"))) for settings in (stored.config, config))
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            yield Change(name, then.get(name), now.get(name))
    kinds = {name.partition(":")[0] for name in stored.parts} & {name.partition(":")[0] for name in parts}
    for name in sorted(stored.parts.keys() | parts.keys()):
        change, kind = Change(name, stored.parts.get(name), parts.get(name)), name.partition(":")[0]
        if kind in kinds and change.then != change.now and (kind in _COMPLETE or None not in change):
            yield change


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _is_allowed(name: str, allowed: Collection[str]) -> bool:
    return any(name == part or name.startswith((f"{part}.", f"{part}:")) for part in allowed)
