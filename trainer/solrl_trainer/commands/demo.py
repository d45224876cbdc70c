"""`solrl-train demo`: a rollout service and a training on this machine, and their results."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from solrl_core.registry import FolderRegistry

from solrl_trainer.commands.local_service import rollout_service
from solrl_trainer.run_folder.folder import locked
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import read_settings_file, resolve


@dataclass(frozen=True)
class World:
    """What a demo shows: a preset, with changes that make it short; `plan`: it explores by the plan of its model."""

    preset: str
    settings: tuple[str, ...]
    plan: bool = False

    @property
    def model(self) -> str:
        return self.preset.partition("/")[0]

    @property
    def reward(self) -> str:
        """The trained reward, which the service computes."""
        return self.preset.rpartition("/")[2]


WORDS = World(
    "mini-text/fast/ocr",
    (
        "iterations=8",
        "explore.steps=4",
        "explore.lag=0",
        "optimizer.learning_rate=2e-3",
        "optimizer.warmup_iterations=0",
        "optimizer.cosine_iterations=null",
        "evaluate.prompts=128",
        "evaluate.seeds=1",
        "evaluate.every=1",
        "evaluate.curve_prompts=16",
        "evaluate.stop_after=null",
        "evaluate.fidelity_prompts=0",
    ),
)
"""A miniature learns to spell, in about a minute on two idle cores. Without a lag, candidates come from the version
that they train. Few iterations need a high and constant learning rate. The curve has too few words to stop by."""
SHAPES = World(
    "mini-sana/sol_rl/clipscore",
    (
        "iterations=6",
        "explore.prompts=8",
        "explore.precision=nvfp4",
        "explore.lag=0",
        "optimizer.learning_rate=1.5e-3",
        "algorithm.kl_weight=0",
        "evaluate.fidelity_prompts=2",
    ),
    plan=True,
)
"""A miniature draws shapes, and explores in (emulated) NVFP4 like the paper, in two minutes. Without its slight pull to
the base model, an update needs no velocities of it. Rank fidelity of four groups would take as long as an iteration."""
WORLDS = {"words": WORDS, "shapes": SHAPES}


def demo(output: Path, *, world: str, seed: int, overrides: Sequence[str]) -> None:
    """Start the service, train and stop; print the result.

    A ConfigError about settings, a FileExistsError about the folder, or a ValueError about missing packages of the
    reward comes before anything is started.
    """
    began, chosen = time.monotonic(), WORLDS[world]
    config = demo_config(chosen, overrides, {"output": output, "run": "demo", "seed": seed})
    with ExitStack() as resources:
        resources.enter_context(locked(output))
        _require_new(output)
        _require_packages(chosen.reward)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of packages that are not needed
        console = Console(stderr=True, markup=False, highlight=False)
        console.print(f"starting a rollout service with {chosen.model}", soft_wrap=True)
        imports = partial(import_module, "solrl_trainer.commands.run")
        with rollout_service(chosen.model, output / "service.log", [chosen.reward], meanwhile=imports) as url:
            console.print(f"watch the run at {url}/", soft_wrap=True)
            from solrl_trainer.commands.run import run

            config = config.model_copy(update={"rollout_url": url})
            if chosen is WORDS:
                from solrl_trainer.commands.demo_words import WordsReporter

                summary = run(config, reporter=WordsReporter(config.iterations))
            else:
                summary = run(config)
    if chosen is WORDS:
        from solrl_trainer.commands.demo_words import show_words

        show_words(summary, output, time.monotonic() - began)
    else:
        from solrl_trainer.records.progress import show_result

        show_result(summary, output)


def _require_new(folder: Path) -> None:
    """Refuse a folder with a run, finished or not."""
    if not (folder / "config.json").is_file():
        return
    report = folder / "report.html"
    state = f"its report is {report}" if report.is_file() else "it has not finished"
    raise FileExistsError(
        f"{folder} has an earlier demo's run, and {state}; to run the demo again, delete it (rm -r {folder}), or "
        "choose another folder: solrl-train demo --output FOLDER"
    )


def _require_packages(reward: str) -> None:
    """Refuse a reward whose packages are missing."""
    from importlib.util import find_spec

    from solrl_core.reward_registry import REWARDS

    packages: Mapping[str, str] = getattr(REWARDS.find(reward), "packages", {})
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the reward {reward} needs {' and '.join(missing)}; install them: "
            f"{sys.executable} -m pip install '{packages[missing[0]]}'. `solrl-train demo --world shapes` needs neither"
        )


def plan_file() -> Path:
    """The exploration plan that ships with the model of the shapes, by benchmarks/demo_plan.py."""
    return Path(FolderRegistry("model", "solrl.models").locate(SHAPES.model)) / "plan.json"


def demo_config(
    world: World = WORDS, overrides: Sequence[str] = (), arguments: Mapping[str, Any] | None = None
) -> RunConfig:
    """Settings of a demo: preset, shipped plan, the world's settings, `overrides`; a ConfigError names a bad one."""
    files = {"plan.json": read_settings_file(plan_file())} if world.plan else {}
    # The address is that of the service's own place, until it has one.
    fixed = {"rollout_url": "http://127.0.0.1:8100", **(arguments or {})}
    return resolve(world.preset, files=files, overrides=[*world.settings, *overrides], arguments=fixed).config
