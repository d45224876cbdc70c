"""Trials of the benchmarks on the miniatures: each runs to its end at a tiny size, and writes its results.

Benchmarks with other tests: faults.py, load, hardening.py, peers.py, paper and demo_figures.py.
Not tried: parity, which reads a clone of an algorithm's public code.
"""

import importlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from _pytest.mark import ParameterSet
from rollout_phase import Sizes
from solrl_core.model_options import ImageSize

pytestmark = pytest.mark.slow

SMALL = "explore.candidates=4 explore.keep=2"
SHORT = "explore.steps=2 regenerate.steps=2"
TINY_CLIP = {"support.true_size.TINY_CLIP": ImageSize(16, 16, 9)}
TINY_PHASES = {
    "flux": Sizes(3, 1, explore_steps=2, regenerate_steps=2, batch=2),
    "wan": Sizes(3, 1, explore_steps=2, regenerate_steps=2, batch=2, guidance=2.0),
}


@dataclass(frozen=True)
class Trial:
    """A benchmark at a tiny size.

    Attributes:
        words: its arguments; {} is an empty folder.
        sizes: constants of modules.
        release: takes more than 15 s of a core, so only `--release` tries it.
    """

    module: str
    words: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    release: bool = False


TRIALS = (
    Trial(
        "step_time",
        "--device cpu --models sana wan wan-81 --tiers 'diffusers bf16 compiled' bf16 'nvfp4 emulated'",
        {"step_time.ROUNDS": 1, "step_time.BATCH": {"sana": 4, "wan": 4, "wan-81": 2}},
    ),
    Trial(
        "rollout_phase",
        "--device cpu --models flux wan --parts share --rounds 1",
        {
            **TINY_CLIP,
            **{"rollout_phase.SIZES": TINY_PHASES, "rollout_phase.FEWER_STEPS": 1},
        },
    ),
    Trial(
        "training_phase",
        "--device cpu --models sana",
        {f"training_phase.{name}": 1 for name in ("ROUNDS", "MICRO_BATCHES")},
    ),
    Trial("run_memory", f"--device cpu --models sana --set {SMALL} {SHORT} evaluate.prompts=2 'evaluate.rewards=[]'"),
    Trial(
        "memory",
        "--device cpu --models sana wan --tiers bf16 nvfp4",
        {**TINY_CLIP, "memory.MODELS": {"sana": 2, "wan": 1}},
    ),
    Trial("equal_gpus", f"--device cpu --models sana --set {SMALL}"),
    Trial(
        "workers",
        "--workers 1 --chunks 1 --rounds 1",
        {"workers.STEPS": 1, "workers.CHUNK_SIZE": 2},
        release=True,
    ),
    Trial("rank_fidelity", "--models mini-sana --rewards clipscore --prompts 2 --candidates 24 --precisions nvfp4"),
    Trial(
        "plan_fidelity",
        "--models mini-sana --prompts 2 --candidates 25 --precisions nvfp4 --chosen-on 1 --scores {}",
        release=True,
    ),
    Trial(
        "true_run",
        f"--weights {{}} --devices cpu cpu cpu --iterations 3 --set {SMALL} evaluate.every=3",
        {"true_run.CANDIDATES": 2, "true_run.STEPS": 1},
        release=True,
    ),
)


def params() -> Iterator[ParameterSet]:
    for trial in TRIALS:
        yield pytest.param(trial, id=trial.module, marks=[pytest.mark.release] if trial.release else [])


@pytest.mark.parametrize("trial", params())
def test_a_benchmark_runs_to_its_end(trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, folder = tmp_path / "out", tmp_path / "folder"
    folder.mkdir()
    for name, value in trial.sizes.items():
        monkeypatch.setattr(name, value)
    words = [word.replace("{}", str(folder)) for word in shlex.split(trial.words)]
    monkeypatch.setattr(sys, "argv", [f"{trial.module}.py", *words, "--out", str(out)])
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ):
        importlib.import_module(trial.module).main()
    assert {file.name for file in out.iterdir()} == {f"{trial.module}.json", f"{trial.module}.md"}
    assert not [file.name for file in out.glob("*.json") if '"failed"' in file.read_text()]
