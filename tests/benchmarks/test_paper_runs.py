"""Runs of the paper's tables: shared, resumed, refused, tuned, and estimated."""

import json
import math
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paper import runner, worker
from paper.arms import Context
from paper.experiments import Experiment, Programme
from paper.finished import MixedRunsError, file_of, read_finished
from paper.runner import run_all
from paper.tuning import Tuning, trials
from paper.worker import JOB, Job, do
from paper_runs import MACHINE, context_of, finish
from solrl_trainer.loop import train
from solrl_trainer.settings.config import RunConfig

TINY: dict[str, Any] = {
    "explore.prompts": 2,
    "explore.candidates": 6,
    "explore.keep": 4,
    "iterations": 2,
    "optimizer.updates": 1,
    "lora.rank": 2,
    "checkpoint_every": 1,
    "evaluate.every": 1,
    "evaluate.prompts": 3,
    "evaluate.seeds": 2,
    "evaluate.steps": 2,
    "evaluate.fidelity_prompts": 0,
}
PROGRAMME = Programme(seeds=(1, 2))


def runs_of(*seeds: int) -> list[Experiment]:
    return [PROGRAMME.experiment("sol_rl", seed) for seed in seeds]


def job(experiment: Experiment, folder: Path, **changes: Any) -> Job:
    return Job(**({"experiment": experiment, "folder": folder, "jobs": 1, "device": "cpu", "grid": False} | changes))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sol_rl", pytest.param("flowgrpo", marks=pytest.mark.release)])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Programme(judges=("verifier",), changes=TINY).experiment(recipe, 1)
    do(job(experiment, tmp_path / "whole", grid=True))
    assert file_of(experiment, tmp_path / "whole").with_suffix(".png").is_file()
    assert not (tmp_path / "whole/work" / experiment.name).exists()

    def half(config: RunConfig, *args: Any, **named: Any) -> Any:
        train(config.model_copy(update={"iterations": 1}), *args, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "train", half)
        with pytest.raises(KeyboardInterrupt):
            do(job(experiment, tmp_path / "halves"))
    assert not file_of(experiment, tmp_path / "halves").exists()
    checkpoints = tmp_path / "halves/work" / experiment.name / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["000001"]
    do(job(experiment, tmp_path / "halves"))
    whole, halves = (read_finished([experiment], tmp_path / name)[experiment.name] for name in ("whole", "halves"))
    assert whole.curve == halves.curve
    assert [version for version, _ in whole.curve] == [0, 1, 2]
    for name, values in whole.after.items():
        assert np.array_equal(values, halves.after[name]), name
    assert whole.after["clipscore"].shape == (3,)
    assert any(not np.array_equal(whole.after[name], whole.before[name]) for name in whole.after)


def test_a_run_that_is_not_finite_is_finished_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(config: RunConfig, *args: Any, **named: Any) -> Any:
        (config.output / "metrics.jsonl").write_text('{"event": "evaluation", "version": 0, "rewards": {}}\n')
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(worker, "train", diverge)
    experiment = PROGRAMME.experiment("sol_rl", 1)
    do(job(experiment, tmp_path))
    runs = read_finished([experiment], tmp_path)
    assert runs[experiment.name].stopped == "the loss is nan"
    assert str(Context(PROGRAMME, runs).arm("sol_rl").gain()) == "1 stopped"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"machine": "another machine"}, f"2 machines: {MACHINE}; another machine; expected one"),
        ({"prompts": ["another"]}, "judged on different prompts"),
    ],
)
def test_runs_that_cannot_be_compared_are_not_mixed(other: dict[str, Any], said: str, tmp_path: Path) -> None:
    runs = runs_of(1, 2)
    for one, changes in zip(runs, ({}, other), strict=True):
        finish(one, tmp_path, 0.1, **changes)
    with pytest.raises(MixedRunsError, match=said):
        read_finished(runs, tmp_path)


def test_runs_of_a_preset_that_changed_are_refused(tmp_path: Path) -> None:
    one = PROGRAMME.experiment("sol_rl", 1)
    finish(one, tmp_path, 0.1)
    path = file_of(one, tmp_path)
    stored = json.loads(path.read_text())
    stored["config"]["optimizer"]["learning_rate"] = 5.0
    del stored["config"]["optimizer"]["eps"]  # a setting that was added since
    path.write_text(json.dumps(stored))
    with pytest.raises(MixedRunsError, match=r"other values of optimizer\.learning_rate than"):
        read_finished([one], tmp_path)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, begun = runs_of(1, 2, 3), list[str]()

    def start(command: list[str], **options: Any) -> None:
        own = JOB.validate_json(command[2])
        begun.append(own.experiment.name)
        assert own.grid == (own.experiment.seed == 2)
        if own.experiment == runs[1]:
            raise subprocess.CalledProcessError(2, command)

    monkeypatch.setattr(runner.subprocess, "run", start)
    assert run_all(runs, tmp_path, jobs=1, until=math.inf, shown_seed=2) == {runs[1].name}
    assert begun == [one.name for one in runs]


def on_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, hold: Callable[[str], object]) -> dict[str, str]:
    """Simulate GPUs and processes: run → its GPU, as runs begin. Each lasts as long as `hold` with its name."""
    begun: dict[str, str] = {}

    def start(command: list[str], *, env: Mapping[str, str], **_: Any) -> None:
        own = JOB.validate_json(command[2])
        begun[own.experiment.name] = env["CUDA_VISIBLE_DEVICES"]
        hold(own.experiment.name)

    monkeypatch.setattr(runner.subprocess, "run", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return begun


def test_a_run_begins_on_the_gpu_of_one_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, ended = runs_of(1, 2, 3, 4), threading.Semaphore(0)
    long_begun = threading.Event()

    def hold(name: str) -> None:
        if name == runs[0].name:
            long_begun.set()
            for _ in range(3):
                assert ended.acquire(timeout=600)
        assert long_begun.wait(600)
        ended.release()

    begun = on_gpus(monkeypatch, 2, hold)
    run_all(runs, tmp_path, jobs=2, until=math.inf, device="auto")
    assert len(begun) == len(runs)
    long = begun.pop(runs[0].name)
    assert set(begun.values()) == {"0", "1"} - {long}


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda", "", ["0", "1", "2"]),
        ("auto", "5, GPU-a,7", ["5", "GPU-a", "7"]),
        ("cuda:1", "", []),
        ("cpu", "", []),
    ],
)
def test_the_visible_gpus_are_those_of_the_command(
    device: str, visible: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch, 3, str)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert runner.visible_gpus(device) == expected


def test_the_learning_rate_is_that_of_the_best_training_reward(tmp_path: Path) -> None:
    awm = Tuning("awm")
    for number, one in enumerate(trials(PROGRAMME, awm).values()):
        assert context_of(PROGRAMME, tmp_path).choice(awm) is None
        stopped = {"stopped": "the loss is nan", "after": {}} if number == 3 else {}
        finish(one, tmp_path, float(number), **stopped)
    choice = context_of(PROGRAMME, tmp_path).choice(awm)
    assert choice is not None
    assert (choice.rate, choice.scores[3e-3], choice.at_edge) == (1e-3, -math.inf, False)
