"""Runs of the paper's tables: shared, resumed, refused, tuned, and estimated."""

import json
import math
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
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
from paper.worker import do
from solrl_trainer.loop import train
from solrl_trainer.settings.config import RunConfig
from support.paper_runs import MACHINE, TINY, context_of, finish

PROGRAMME = Programme(seeds=(1, 2))


def runs_of(*seeds: int) -> list[Experiment]:
    return [PROGRAMME.experiment("sol_rl", seed) for seed in seeds]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sol_rl", pytest.param("flowgrpo", marks=pytest.mark.release)])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Programme(judges=("verifier",), changes=TINY).experiment(recipe, 1)
    do(experiment, tmp_path / "whole")
    assert file_of(experiment.name, tmp_path / "whole", "png").is_file()
    assert not (tmp_path / "whole/work" / experiment.name).exists()

    def half(config: RunConfig, *args: Any, **named: Any) -> Any:
        train(config.model_copy(update={"iterations": 1}), *args, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "train", half)
        with pytest.raises(KeyboardInterrupt):
            do(experiment, tmp_path / "halves")
    assert not file_of(experiment.name, tmp_path / "halves").exists()
    checkpoints = tmp_path / "halves/work" / experiment.name / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["000001"]
    do(experiment, tmp_path / "halves")
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
    do(experiment, tmp_path)
    runs = read_finished([experiment], tmp_path)
    assert runs[experiment.name].stopped == "the loss is nan"
    assert str(Context(PROGRAMME, runs).arm("sol_rl").gain()) == "1 stopped"


def test_runs_that_cannot_be_compared_are_not_mixed(tmp_path: Path) -> None:
    first, second = runs_of(1, 2)
    on_text = replace(PROGRAMME, model="mini-text", reward="ocr", rewards=("ocr",)).experiment("sol_rl", 1)
    finish(first, tmp_path, 0.1)
    finish(on_text, tmp_path, 0.1, machine="another machine", prompts=["another"])
    assert len(read_finished([first, on_text], tmp_path)) == 2
    finish(second, tmp_path, 0.1, machine="another machine")
    with pytest.raises(MixedRunsError, match=f"2 machines: {MACHINE}; another machine; expected one"):
        read_finished([first, second], tmp_path)
    finish(second, tmp_path, 0.1, prompts=["another"])
    with pytest.raises(MixedRunsError, match="judged on different prompts"):
        read_finished([first, second], tmp_path)


def test_runs_of_a_preset_that_changed_are_refused(tmp_path: Path) -> None:
    one = PROGRAMME.experiment("sol_rl", 1)
    finish(one, tmp_path, 0.1)
    path = file_of(one.name, tmp_path)
    stored = json.loads(path.read_text())
    stored["config"]["optimizer"]["learning_rate"] = 5.0
    del stored["config"]["optimizer"]["weight_decay"]  # a setting that was added since
    path.write_text(json.dumps(stored))
    with pytest.raises(MixedRunsError, match=r"other values of optimizer\.learning_rate than"):
        read_finished([one], tmp_path)


def test_runs_begin_on_free_gpus_and_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, ended, long_begun = runs_of(1, 2, 3, 4), threading.Semaphore(0), threading.Event()
    begun: dict[int, str] = {}

    def start(command: list[str], *, env: Mapping[str, str], **_: Any) -> None:
        folder, jobs, preset, seed, *settings = command[2:]
        assert Experiment(preset, tuple(settings), int(seed)) == runs[int(seed) - 1]
        assert (folder, jobs) == (str(tmp_path), "2")
        begun[int(seed)] = env["CUDA_VISIBLE_DEVICES"]
        if seed == "1":
            long_begun.set()
            for _ in runs[1:]:
                assert ended.acquire(timeout=600)
        assert long_begun.wait(600)
        ended.release()
        if seed == "2":
            raise subprocess.CalledProcessError(2, command)

    monkeypatch.setattr(runner.subprocess, "run", start)
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["0", "1"])
    assert run_all(runs, tmp_path, jobs=2, until=math.inf) == {runs[1].name}
    long = begun.pop(1)
    assert begun == dict.fromkeys((2, 3, 4), "1" if long == "0" else "0")


@pytest.mark.parametrize(("visible", "expected"), [("", ["0", "1", "2"]), ("5, GPU-a,7", ["5", "GPU-a", "7"])])
def test_the_visible_gpus_are_those_of_the_command(
    visible: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert runner.visible_gpus() == expected


def test_the_learning_rate_is_that_of_the_best_training_reward(tmp_path: Path) -> None:
    awm = Tuning("awm")
    for number, one in enumerate(trials(PROGRAMME, awm).values()):
        assert context_of(PROGRAMME, tmp_path).choice(awm) is None
        stopped = {"stopped": "the loss is nan", "after": {}} if number == 3 else {}
        finish(one, tmp_path, float(number), **stopped)
    choice = context_of(PROGRAMME, tmp_path).choice(awm)
    assert choice is not None
    assert (choice.rate, choice.scores[3e-3], choice.at_edge) == (1e-3, -math.inf, False)
