"""Presets `<model>/<recipe>/<reward>`, composed from small tables.

Later layers override earlier ones: field defaults, model, recipe, recipe for the model, reward, YAML files in their
order, `--set key=value`. The source of every value is recorded for a dry run.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from solrl_core.suggestions import did_you_mean
from solrl_proto.text_files import read_text

from solrl_trainer.algorithms.base import AlgorithmSettings
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.config import RunConfig
from solrl_trainer.defaults import DEFAULT_PRESET
from solrl_trainer.unique_yaml import load_unique

Layer = tuple[str, Mapping[str, Any]]
"""(source, dotted key → value)."""

_MINIATURE = {
    "prompts": "shapes",
    "iterations": 40,
    "explore.prompts": 12,
    "optimizer.learning_rate": 1e-3,
    "optimizer.updates": 6,
    "optimizer.batch": 48,
    "evaluate.steps": 10,
    "evaluate.rewards": ("verifier", "verifier_graded", "judge"),
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
        "optimizer.max_grad_norm": 0.002,
    },
    # DiffusionNFT's configuration (NVlabs/DiffusionNFT, config/nft.py): 512 px, no guidance.
    "sd3-medium": {
        "model": "stabilityai/stable-diffusion-3.5-medium",
        "prompts": "prompts",
        "solver": "dpm2",
        "optimizer.batch": 9,
        "algorithm.timestep_fraction": 0.99,
    },
    # UniRL's recipe (Tencent-Hunyuan/UniRL, examples/diffusion/z_image/z_image_trainside.yaml): 512 px, no guidance.
    "z-image": {
        "model": "Tongyi-MAI/Z-Image",
        "prompts": "prompts",
        "lora.rank": 64,
        "lora.alpha": 128.0,
        "optimizer.batch": 8,
    },
    # UniRL's DiffusionNFT (Tencent-Hunyuan/UniRL, examples/diffusion/qwen_image/qwen_image_nft.yaml): no guidance.
    "qwen-image": {
        "model": "Qwen/Qwen-Image",
        "prompts": "prompts",
        "lora.rank": 64,
        "lora.alpha": 128.0,
        "optimizer.batch": 4,
        "algorithm.timestep_fraction": 0.99,
    },
    # Flow-Factory's DiffusionNFT (X-GenGroup/Flow-Factory, examples/nft/lora/flux2_klein_base): no guidance.
    "flux2-klein": {
        "model": "black-forest-labs/FLUX.2-klein-base-4B",
        "prompts": "prompts",
        "lora.rank": 64,
        "lora.alpha": 128.0,
        "optimizer.batch": 12,
        "algorithm.timestep_fraction": 0.5,
        "algorithm.global_std": False,
        "evaluate.steps": 28,
    },
    "flux1": {
        "model": "black-forest-labs/FLUX.1-dev",
        "prompts": "prompts",
        "solver": "dpm2",
        "optimizer.batch": 12,
        "algorithm.timestep_fraction": 0.4,
        "evaluate.steps": 28,
    },
}
_LOCAL = {"explore.source": "local", "explore.steps": 10, "regenerate.at": "none"}
_AWM = {
    "algorithm.name": "awm",
    "algorithm.timestep_fraction": 0.5,
    "regenerate.steps": 14,
    "optimizer.max_grad_norm": 1.0,
    "policy.decay_max": 0.3,
    "policy.ema": 0.99,
}
_DPO = {
    "algorithm.name": "dpo",
    "optimizer.learning_rate": 1e-5,
    "optimizer.weight_decay": 1e-2,
    "optimizer.max_grad_norm": 1.0,
}
_GRPO = {
    "algorithm.timestep_fraction": 1.0,
    "optimizer.updates": 2,
    "optimizer.max_grad_norm": 1.0,
    # Every iteration begins on the policy that generated its samples.
    "policy.decay_max": 0.0,
}
_FLOWGRPO = {"algorithm.name": "flowgrpo", **_GRPO}
_FLOWGRPO_FAST = {
    **_FLOWGRPO,
    "algorithm.clip_range": 1e-5,
    "algorithm.eta": 0.8,
    "algorithm.kl_weight": 0.0,
    "algorithm.window": 2,
    "algorithm.window_within": 0.5,
}
_DANCEGRPO = {"algorithm.name": "dancegrpo", **_GRPO, "algorithm.timestep_fraction": 0.6, "explore.keep": 12}
_TRAINED = {**_LOCAL, "explore.precision": "bf16"}


def _same_steps(steps: int) -> dict[str, Any]:
    """Explore by the trained trajectories: their noise replaces the initial noise, so the ODE ranks otherwise."""
    return {"explore.sampler": "training", "explore.steps": steps, "regenerate.steps": steps}


RECIPES: dict[str, dict[str, Any]] = {
    "diffusionnft": {**_LOCAL, "explore.precision": "bf16", "explore.candidates": 24},
    "naive_scaling": {**_LOCAL, "explore.precision": "bf16"},
    "naive_quant": {**_LOCAL, "explore.precision": "nvfp4"},
    "sol_rl": {},
    "awm": {**_AWM, **_TRAINED, "explore.candidates": 24, "explore.steps": 14},
    "awm_two_stage": _AWM,
    "dpo": {**_DPO, **_TRAINED, "explore.candidates": 24},
    "dpo_two_stage": _DPO,
    "flowgrpo": {**_FLOWGRPO, **_TRAINED, "explore.candidates": 24},
    "flowgrpo_two_stage": {**_FLOWGRPO, **_same_steps(10)},
    "flowgrpo_fast": {**_FLOWGRPO_FAST, **_TRAINED, "explore.candidates": 24},
    "flowgrpo_fast_two_stage": {**_FLOWGRPO_FAST, **_same_steps(10)},
    "dancegrpo": {**_DANCEGRPO, **_TRAINED, "explore.candidates": 12, "explore.steps": 12},
    "dancegrpo_two_stage": {**_DANCEGRPO, **_same_steps(12), "explore.candidates": 48},
}
_STAGES = ("", "_two_stage")
_MINI_CLIPS = {"flowgrpo": 1e-3, "flowgrpo_fast": 1e-4, "dancegrpo": 1e-3}
"""About 10 times those of the papers, whose latents have 64 to 127 times as many values: a mean over n values varies as
1 / √n."""
_DANCE_LARGE = {"explore.prompts": 16, "lora.rank": 128, "lora.alpha": 256.0, "evaluate.every": 25}
"""Its iterations are short, so evaluations every 10 would take a tenth of the time."""
# Flow-GRPO trains SD3.5-Medium with guidance (yifan123/flow_grpo, config/grpo.py: pickscore_sd3, pickscore_sd3_fast).
_GUIDED = {"guidance": 4.5}
# UniRL's FlowGRPO on Z-Image: three stochastic steps within the first half of 12.
_Z_IMAGE_FAST = {
    "algorithm.clip_range": 1e-4,
    "algorithm.eta": 0.7,
    "algorithm.window": 3,
    "explore.prompts": 64,
    "explore.keep": 16,
    "optimizer.weight_decay": 0.0,
}
# Flow-GRPO on Qwen-Image (yifan123/flow_grpo, config/grpo.py: pickscore_qwenimage); verl-omni's is the same.
_QWEN_FAST = {
    "guidance": 4.0,
    "algorithm.clip_range": 1e-4,
    "algorithm.eta": 1.2,
    "explore.prompts": 32,
    "explore.keep": 16,
    "evaluate.steps": 50,
    "evaluate.every": 25,
}
# UniRL's DanceGRPO: three stochastic steps, all trained, within the first half; on Qwen-Image:
_UNIRL_DANCE = {
    "algorithm.eta": 0.7,
    "algorithm.window": 3,
    "algorithm.window_within": 0.5,
    "algorithm.timestep_fraction": 1.0,
    "explore.keep": 16,
    "optimizer.weight_decay": 0.0,
}
_QWEN_DANCE = {**_UNIRL_DANCE, "algorithm.global_std": True}
# Flow-Factory on FLUX.2 [klein]: examples/nft, examples/grpo and examples/awm.
_KLEIN_NFT = {"optimizer.learning_rate": 1e-4, "algorithm.beta": 0.1, "algorithm.kl_weight": 0.0}
_KLEIN_FAST = {
    "guidance": 4.0,
    "algorithm.clip_range": 1e-4,
    "algorithm.eta": 0.7,
    "algorithm.window": 1,
    "explore.keep": 16,
}
# UniRL's on FLUX.2 [klein] (examples/diffusion/flux2_klein/flux2_klein_trainside.yaml).
_KLEIN_DANCE = {
    **_UNIRL_DANCE,
    "algorithm.clip_range": 5e-3,
    "explore.prompts": 64,
    "lora.rank": 16,
    "lora.alpha": 32.0,
    "optimizer.learning_rate": 5e-5,
}
_GUIDED_FLOWGRPO = {"guidance": 4.0, "algorithm.kl_weight": 0.0}
_FLUX_FLOWGRPO = {"algorithm.eta": 0.9, "algorithm.kl_weight": 0.0}
_LARGE = ("sana", "sd3", "sd3-medium", "z-image", "flux1")
_MINIS = ("mini-sana", "mini-sd3", "mini-flux")
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {
    **{(model, f"dpo{stages}"): {"optimizer.learning_rate": 3e-5} for model in _MINIS for stages in _STAGES},
    **{
        (model, recipe + stages): {"algorithm.clip_range": clip}
        for model in _MINIS
        for recipe, clip in _MINI_CLIPS.items()
        for stages in _STAGES
    },
    **{(model, f"dancegrpo{stages}"): _DANCE_LARGE for model in _LARGE for stages in _STAGES},
    **{("sd3-medium", recipe + stages): _GUIDED for recipe in ("flowgrpo", "flowgrpo_fast") for stages in _STAGES},
    **{("sd3-medium", f"awm{stages}"): {"explore.prompts": 24} for stages in _STAGES},
    ("z-image", "flowgrpo_fast"): {**_Z_IMAGE_FAST, "explore.candidates": 16, "explore.steps": 12},
    ("z-image", "flowgrpo_fast_two_stage"): {**_Z_IMAGE_FAST, **_same_steps(12), "explore.candidates": 64},
    ("qwen-image", "flowgrpo_fast"): {**_QWEN_FAST, "explore.candidates": 16},
    ("qwen-image", "flowgrpo_fast_two_stage"): {**_QWEN_FAST, "explore.candidates": 64},
    ("qwen-image", "dancegrpo"): {**_QWEN_DANCE, "explore.candidates": 16},
    ("qwen-image", "dancegrpo_two_stage"): {**_QWEN_DANCE, "explore.candidates": 64},
    **{("flux2-klein", r): _KLEIN_NFT for r in ("diffusionnft", "naive_scaling", "naive_quant", "sol_rl")},
    **{("flux2-klein", f"awm{stages}"): {"guidance": 4.0} for stages in _STAGES},
    ("flux2-klein", "flowgrpo_fast"): {**_KLEIN_FAST, "explore.candidates": 16, "explore.steps": 8},
    ("flux2-klein", "flowgrpo_fast_two_stage"): {**_KLEIN_FAST, **_same_steps(8), "explore.candidates": 64},
    ("flux2-klein", "dancegrpo"): {**_KLEIN_DANCE, "explore.candidates": 16, "explore.steps": 10},
    ("flux2-klein", "dancegrpo_two_stage"): {**_KLEIN_DANCE, **_same_steps(10), "explore.candidates": 64},
    **{(m, f"flowgrpo{stages}"): _GUIDED_FLOWGRPO for m in ("qwen-image", "flux2-klein") for stages in _STAGES},
    ("flux1", "flowgrpo"): {**_FLUX_FLOWGRPO, "explore.steps": 6},
    ("flux1", "flowgrpo_two_stage"): {**_FLUX_FLOWGRPO, **_same_steps(6)},
    ("flux1", "flowgrpo_fast"): {"explore.steps": 6},
    ("flux1", "flowgrpo_fast_two_stage"): _same_steps(6),
}
"""(model, recipe) → settings for this pair, over the recipe's: those of the papers' code for FLUX.1 and for LoRA on
large models, and others scaled to the miniatures."""
RECIPE_WORDS = {
    "diffusionnft": "24 candidates per prompt, all trained on; no rollout service",
    "naive_scaling": "96 candidates per prompt in BF16, the best and worst 24 trained on; no rollout service",
    "naive_quant": "96 candidates per prompt in NVFP4, the best and worst 24 trained on; no rollout service",
    "sol_rl": "96 candidates per prompt explored by a rollout service, the best and worst 24 regenerated in BF16",
    "awm": "advantage weighted matching on 24 candidates",
    "awm_two_stage": "AWM on the best and worst 24 of 96",
    "dpo": "Diffusion-DPO on 12 pairs of 24 candidates",
    "dpo_two_stage": "Diffusion-DPO on 12 pairs out of 96",
    "flowgrpo": "FlowGRPO on 24 stochastic trajectories each",
    "flowgrpo_two_stage": "FlowGRPO on the best and worst 24 of 96",
    "flowgrpo_fast": "FlowGRPO-Fast on two stochastic steps of 24",
    "flowgrpo_fast_two_stage": "FlowGRPO-Fast on the best and worst 24 of 96",
    "dancegrpo": "DanceGRPO on 12 stochastic trajectories each",
    "dancegrpo_two_stage": "DanceGRPO on the best and worst 12 of 48",
}
REWARD_WORDS = {
    "clipscore": "CLIP similarity of image and prompt",
    "pickscore": "human preference: PickScore",
    "hpsv2": "human preference: HPS v2.1",
    "imagereward": "human preference: ImageReward",
}
REWARDS: dict[str, dict[str, Any]] = {name: {"rewards": {name: 1.0}} for name in REWARD_WORDS}


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


def print_presets() -> None:
    """Print a table of the parts of a preset's name."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    models = {name: str(settings["model"]) for name, settings in MODELS.items()}
    words = {name: "miniature, runs on a CPU" if model == name else model for name, model in models.items()}
    print(f"A preset is <model>/<recipe>/<reward>, as in {DEFAULT_PRESET}")
    # A table for each part: long names of recipes must not fold the names of models.
    for part, rows in (("<model>", words), ("<recipe>", RECIPE_WORDS), ("<reward>", REWARD_WORDS)):
        table = Table(box=box.SIMPLE_HEAD, show_header=part == "<model>", show_edge=False, padding=(0, 1, 0, 0))
        for column in ("part", "name", "stands for"):
            table.add_column(column)
        table.columns[2].overflow = "fold"
        for row, (name, meaning) in enumerate(rows.items()):
            table.add_row("" if row else part, name, meaning)
        Console().print(table)
        print()
    print("Other rewards, and sums: --set 'rewards={clipscore: 1, hpsv2: 0.5}'")


def _pick(table: Mapping[str, dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    if name not in table:
        raise ConfigError(f"got {kind} {name!r}{did_you_mean(name, table)}; expected one of {sorted(table)}")
    return table[name]


def resolve(
    preset: str,
    *,
    overrides: Sequence[str] = (),
    files: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Resolved:
    """Compose a run's settings.

    Args:
        preset: `<model>/<recipe>/<reward>`.
        overrides: `key=value` strings, the value in YAML.
        files: contents of YAML files by name, nested or dotted; later ones win.
        arguments: dotted settings from the command line's own options.

    Raises:
        ConfigError: unknown preset or key, or an invalid value.
    """
    parts = preset.split("/")
    if len(parts) != 3:
        raise ConfigError(f"got preset {preset!r}; expected <model>/<recipe>/<reward>, e.g. {DEFAULT_PRESET}")
    model, recipe, reward = parts
    layers: list[Layer] = [
        ("preset", {"preset": preset, "run": preset.replace("/", "-")}),
        (f"model {model}", _pick(MODELS, "model", model)),
        (f"recipe {recipe}", _pick(RECIPES, "recipe", recipe)),
        (f"recipe {recipe} for {model}", VARIANTS.get((model, recipe), {})),
        (f"reward {reward}", _pick(REWARDS, "reward", reward)),
    ]
    return _compose([*layers, *_given(overrides, files, arguments)])


def resolve_again(
    saved: RunConfig,
    *,
    overrides: Sequence[str] = (),
    files: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Resolved:
    """The settings of a run that is continued: those it had, and what is given now. Raises as `resolve`."""
    source = str(saved.output / "config.json")
    layer = _flatten(saved.model_dump(mode="json"), set(_flatten_fields()))
    return _compose([(source, layer), *_given(overrides, files, arguments)])


def _given(
    overrides: Sequence[str], files: Mapping[str, Any] | None, arguments: Mapping[str, Any] | None
) -> list[Layer]:
    known = set(_flatten_fields())
    layers: list[Layer] = []
    for name, content in (files or {}).items():
        if not isinstance(content, Mapping):
            raise ConfigError(f"{name} contains a {type(content).__name__}; expected a mapping of settings")
        layers.append((name, _flatten(content, known)))
    layers.append(("--set", dict(parse_override(override) for override in overrides)))
    layers.append(("command line", {k: v for k, v in (arguments or {}).items() if v is not None}))
    return layers


def _compose(layers: Sequence[Layer]) -> Resolved:
    known = {*_flatten_fields(), *_algorithm_fields(layers)}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        for key, value in layer.items():
            if key not in known:
                raise _unknown(key, known, source)
            values[key], sources[key] = value, source
    if "output" not in values:
        values["output"], sources["output"] = f"runs/{values['run']}", "run"
    try:
        config = RunConfig.model_validate(_nest(values))
    except ValidationError as error:
        raise refused(error, sources) from error
    if sources["run"] == "preset":
        run = _default_run(config)
        output = Path("runs", run) if sources["output"] == "run" else config.output
        config = config.model_copy(update={"run": run, "output": output})
    return Resolved(config, {key: sources.get(key, "default") for key in sorted(known)})


def _default_run(config: RunConfig) -> str:
    """Name of a run after its preset's model and recipe and the rewards that it trains."""
    model, recipe, _ = config.preset.split("/")
    name = "-".join((model, recipe, *config.weights)).lower()
    return re.sub(r"[^a-z0-9._-]", "-", name)[:64].rstrip("._-")


def _unknown(key: str, known: Collection[str], source: str) -> ConfigError:
    if section := sorted(name for name in known if name.startswith(f"{key}.")):
        return ConfigError(f"got setting {key!r} from {source}, which is a section; expected one of {section}")
    return ConfigError(
        f"got setting {key!r} from {source}, which does not exist{did_you_mean(key, known)}; "
        "`solrl-train run --dry-run` prints all settings"
    )


def read_settings_file(path: Path) -> Any:
    """The content of a YAML file of settings; an empty one is an empty mapping.

    Raises:
        ConfigError: it cannot be read, is not YAML, or a setting is there twice; names the file and the line.
        TextFileError: it is not UTF-8.
    """
    try:
        content = load_unique(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} cannot be used: {_yaml_fault(error)}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; expected a YAML file with settings") from error
    return {} if content is None else content


def _yaml_fault(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).partition("\n")[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None) or 'cannot be read'}"


def refused(error: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    """ConfigError for the first validation error, with the setting's source; `sources` maps dotted key → layer."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    # The location may be inside a setting (an item of a list), or a whole section.
    given = [source for name, source in sources.items() if f"{key}.".startswith(f"{name}.")]
    given = given or [source for name, source in sources.items() if name.startswith(f"{key}.")]
    source = ", ".join(dict.fromkeys(given)) or "defaults"
    # A rollout URL may be refused for the password in it. A fault between the settings of a section names those.
    between = first["type"] == "value_error" and isinstance(first["input"], Mapping)
    got = "" if key == "rollout_url" or between else f"got {first['input']!r}; "
    place = f"setting {key} (from {source})" if key else "settings"
    return ConfigError(f"{place}: {got}{first['msg'].removeprefix('Value error, ')}")


def parse_override(override: str) -> tuple[str, Any]:
    """Parse `key=value`, with the value in YAML; ConfigError if it is invalid."""
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"got --set {override!r}; expected key=value")
    try:
        return key.strip(), load_unique(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"got --set {override!r}; expected a value in YAML ({_yaml_fault(error)})") from error


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
