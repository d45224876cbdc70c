"""`solrl-train demo`: a rollout service and a training on this machine, and their results."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from solrl_trainer.commands.local_service import rollout_service
from solrl_trainer.run_folder.folder import locked
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve

MODEL, REWARD = "mini-text", "ocr"
PRESET = f"{MODEL}/fast/{REWARD}"
SETTINGS = (
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
)
"""A miniature learns to spell, in about a minute on two idle cores. Without a lag, candidates come from the version
that they train. Few iterations need a high and constant learning rate. The curve has too few words to stop by."""


def demo(output: Path, *, seed: int, overrides: Sequence[str]) -> None:
    """Start the service, train and stop; print the result.

    A ConfigError about settings, a FileExistsError about the folder, or a ValueError about missing packages of the
    reward comes before anything is started.
    """
    began = time.monotonic()
    config = demo_config(overrides, {"output": output, "run": "demo", "seed": seed})
    with ExitStack() as resources:
        resources.enter_context(locked(output))
        _require_new(output)
        _require_packages()
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of packages that are not needed
        console = Console(stderr=True, markup=False, highlight=False)
        console.print(f"starting a rollout service with {MODEL}", soft_wrap=True)
        imports = partial(import_module, "solrl_trainer.commands.run")
        with rollout_service(MODEL, output / "service.log", [REWARD], meanwhile=imports) as url:
            console.print(f"watch the run at {url}/", soft_wrap=True)
            from solrl_trainer.commands.demo_words import WordsReporter, show_words
            from solrl_trainer.commands.run import run

            config = config.model_copy(update={"rollout_url": url})
            summary = run(config, reporter=WordsReporter(config.iterations))
    show_words(summary, output, time.monotonic() - began)


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


def _require_packages() -> None:
    """Refuse missing packages of the reward."""
    from importlib.util import find_spec

    from solrl_core.reward_registry import REWARDS

    packages: Mapping[str, str] = getattr(REWARDS.find(REWARD), "packages", {})
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the reward {REWARD} needs {' and '.join(missing)}; install them: "
            f"{sys.executable} -m pip install '{packages[missing[0]]}'"
        )


def demo_config(overrides: Sequence[str] = (), arguments: Mapping[str, Any] | None = None) -> RunConfig:
    """Settings of the demo: its preset, its settings, `overrides`; a ConfigError names a bad one."""
    # The address is that of the service's own place, until it has one.
    fixed = {"rollout_url": "http://127.0.0.1:8100", **(arguments or {})}
    return resolve(PRESET, overrides=[*SETTINGS, *overrides], arguments=fixed).config
