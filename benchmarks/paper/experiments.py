"""Experiments: a preset, changes to it, and a seed. Equal experiments of several tables are one run."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve

RESULTS = Path(__file__).parents[1] / "results"
"""Stored results of all benchmarks."""
Changes = Mapping[str, Any]
"""Settings by dotted key."""
AS_IS: Changes = MappingProxyType({})
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
JUDGES = ("judge", "verifier", "verifier_graded")
TWO_STAGES: Changes = {"explore.precision": "nvfp4"}
"""Exploration in the trainer's process. Selects the same seeds as a service on an equal device."""
SERVICE = "http://127.0.0.1:8100"
"""Address in settings of runs that need a service; a worker's own replaces it."""
LARGE_BATCHES: Changes = {"batch": 1152, "optimizer.batch": 1728}
"""All candidates of an iteration, and all its training pairs: a pass of a miniature takes a GPU as long with many
images as with few."""
OWN_SETTINGS = ("run", "output", "rollout_url", "device")
"""Settings that say where a run is, and not what it computes."""


@dataclass(frozen=True)
class Experiment:
    """One run.

    Attributes:
        preset: `<model>/<recipe>/<reward>`.
        settings: changes to the preset, `key=value` with the value in JSON, sorted.
        seed: seed of the run.
    """

    preset: str
    settings: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """Name of the run and of its files; different settings have different names."""
        digest = hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:8]
        return f"{self.preset.replace('/', '-')}-{digest}-seed{self.seed}"

    @property
    def config(self) -> RunConfig:
        """All settings; raises ConfigError if one is invalid."""
        return _resolved(self)

    @property
    def reward(self) -> str:
        """The trained reward."""
        return self.preset.rpartition("/")[2]


@cache
def _resolved(experiment: Experiment) -> RunConfig:
    arguments = {"run": experiment.name[:64], "seed": experiment.seed}
    return resolve(experiment.preset, overrides=experiment.settings, arguments=arguments).config


@dataclass(frozen=True)
class Programme:
    """Settings that all tables share.

    Attributes:
        model: miniature of the presets.
        reward: trained reward of the tables with one reward.
        rewards: trained rewards of the tables with several; all of them judge every run.
        judges: further rewards that judge every run.
        seeds: training seeds.
        iterations: of a Sol-RL run.
        long: iterations of a long run.
        every: iterations between evaluations.
        unprepared: model with weights that were not prepared for NVFP4, if there is one.
        changes: settings of all runs, by dotted key.
    """

    model: str = "mini-sana"
    reward: str = "clipscore"
    rewards: tuple[str, ...] = REWARDS
    judges: tuple[str, ...] = JUDGES
    seeds: tuple[int, ...] = (1, 2, 3)
    iterations: int = 40
    long: int = 100
    every: int = 5
    unprepared: str | None = None
    changes: Changes = field(default_factory=dict)

    @property
    def judged_by(self) -> tuple[str, ...]:
        """All rewards that judge a run."""
        return (*self.rewards, *self.judges)

    def experiment(self, recipe: str, seed: int, changes: Changes = AS_IS, *, reward: str | None = None) -> Experiment:
        """A run of a recipe.

        Args:
            recipe: recipe of the preset. Two-stage recipes explore here in NVFP4, the others as the recipe says.
            seed: seed of the run.
            changes: settings by dotted key, over those of the programme.
            reward: trained reward, by default the programme's.
        """
        trained = reward or self.reward
        preset = f"{self.model}/{recipe}/{trained}"
        base = _base(preset)
        wanted: dict[str, Any] = {
            "iterations": self.iterations,
            "evaluate.every": self.every,
            "evaluate.curve_seeds": base["evaluate"]["seeds"],
            "evaluate.rewards": [name for name in self.judged_by if name != trained],
            "evaluate.fidelity_prompts": 8,
            "checkpoint_every": 5,
            "keep_checkpoints": 1,
            **LARGE_BATCHES,
            **(TWO_STAGES if base["regenerate"]["at"] != "none" else {}),
            **self.changes,
            **changes,
        }
        differing = {key: value for key, value in wanted.items() if value != _value(base, key)}
        return Experiment(preset, tuple(f"{key}={json.dumps(differing[key])}" for key in sorted(differing)), seed)


@cache
def _base(preset: str) -> dict[str, Any]:
    return resolve(preset).config.model_dump(mode="json")


def _value(settings: Mapping[str, Any], key: str) -> Any:
    section, dot, name = key.partition(".")
    return settings[section].get(name) if dot else settings[section]


def fitted_plan(model: str) -> dict[str, Any] | None:
    """Settings of the model's fitted steps, stored by plan_fidelity.py.

    None if there are none for this model, or if they were fitted to another solver than the one that its runs use.
    """
    stored = json.loads((RESULTS / "plan_fidelity.json").read_text())
    fitted = stored["solvers"].get(model)
    if fitted is None or stored["solver"][model] != _base(f"{model}/sol_rl/clipscore")["solver"]:
        return None
    return {"explore.fitted": fitted, "explore.steps": len(fitted["sigmas"])}
