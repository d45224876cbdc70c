"""Worlds and arms of the comparison with drawing 24 samples and training on all of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paper.experiments import RESULTS, Changes, Experiment, Programme

BASELINE, STEEP = "24-in-24, β 1", "24-in-24, β 1, 0.001"
FAST, PLAIN, PAPER, UNEXPLORED = "fast", "12-in-12", "Sol-RL as published", "4-in-4"
ALL = "24-in-24"
"""Draws and trains as the baseline does, with the update of `fast`."""


@dataclass(frozen=True)
class World:
    """A miniature and the reward that its runs train on.

    Attributes:
        model: name of the miniature.
        reward: the trained reward.
        guidance: of every phase.
        iterations: of its runs.
    """

    model: str
    reward: str
    guidance: float = 1.0
    iterations: int = 100

    @property
    def name(self) -> str:
        """As it stands in tables."""
        return f"{self.model}, {self.reward}" + ("" if self.guidance == 1 else f", guidance {self.guidance:g}")


@dataclass(frozen=True)
class Stage:
    """Worlds, seeds and arms of one step.

    Attributes:
        worlds: all of them have the same arms.
        seeds: training seeds, which no other stage has.
        arms: name → recipe and changes to it.
    """

    worlds: tuple[World, ...]
    seeds: tuple[int, ...]
    arms: Mapping[str, tuple[str, Changes]]


def plain(keep: int, **changes: Any) -> tuple[str, Changes]:
    """DiffusionNFT on all of `keep` drawn samples, in BF16."""
    return "diffusionnft", {"explore.candidates": keep, "explore.keep": keep, **changes}


FAST_UPDATE: Changes = {
    "optimizer.learning_rate": 1e-3,
    "algorithm.beta": 0.1,
    "algorithm.beta_end": 1.0,
    "algorithm.beta_iterations": 30,
    "algorithm.kl_weight": 0.0,
    "optimizer.warmup_iterations": 3,
    "optimizer.cosine_power": 2.0,
    "optimizer.beta2": 0.99,
    "policy.decay_rate": 1.0,
    "policy.decay_max": 0.4,
}
"""What `fast` changes of DiffusionNFT's update. Not the number of samples."""
BASE: tuple[str, Changes] = ("diffusionnft", {"optimizer.learning_rate": 3e-4})
CONFIRM = Stage(
    worlds=(
        World("mini-sana", "imagereward"),
        World("mini-sd3", "hpsv2"),
        World("mini-flux", "pickscore"),
        World("mini-text", "ocr", guidance=2.0, iterations=50),
    ),
    seeds=(201, 202, 203, 204, 205, 206, 207, 208),
    arms={
        BASELINE: BASE,
        STEEP: ("diffusionnft", {"optimizer.learning_rate": 1e-3}),
        FAST: ("fast", {}),
        ALL: plain(24, **FAST_UPDATE),
        PLAIN: plain(12, **FAST_UPDATE),
        UNEXPLORED: plain(4, **FAST_UPDATE),
        PAPER: ("sol_rl", {"optimizer.learning_rate": 3e-4}),
    },
)
STAGES = {"confirm": CONFIRM}


def experiment(stage: Stage, world: World, arm: str, seed: int) -> Experiment:
    """The run of an arm."""
    recipe, changes = stage.arms[arm]
    solver, fitted = _fitted(world.model)
    programme = Programme(
        model=world.model,
        reward=world.reward,
        rewards=(world.reward,),
        judges=() if world.reward == "ocr" else ("judge",),
        seeds=stage.seeds,
        iterations=world.iterations,
        every=5,
        changes={
            "solver": solver,
            "guidance": world.guidance,
            "evaluate.prompts": 128,
            "evaluate.seeds": 2,
            "evaluate.curve_seeds": 2,
            "evaluate.fidelity_prompts": 0,
            "checkpoint_every": 1000,
            "optimizer.cosine_iterations": "all",
        },
    )
    explored: Changes = {"explore.precision": "fp8", **(fitted if recipe == "fast" else {})}
    # Curves are compared as a whole, so no run ends by itself.
    own: Changes = {"evaluate.stop_after": None, "evaluate.guards": []} if recipe == "fast" else {}
    return programme.experiment(recipe, seed, {**({} if recipe == "diffusionnft" else explored), **own, **changes})


def _fitted(model: str) -> tuple[str, Changes]:
    """The solver of a miniature, and its four steps as plan_fidelity.py fitted them; plain ones if it has none."""
    stored = json.loads((RESULTS / "plan_fidelity.json").read_text())
    solver = stored["solvers"].get(model)
    return stored["solver"].get(model, "euler"), {"explore.steps": 4} | ({"explore.fitted": solver} if solver else {})
