"""Early ends of a run of several ranks: all ranks exit with one message, and the resumed run is the same."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.programs import RankPrograms
from tests.trainer.rank_programs import (
    solrl_train,
    with_a_broken_reward,
    with_a_death_in_a_collective,
    with_a_late_rank,
    with_another_device,
    with_weights_apart,
)
from tests.trainer.rank_runs import LAST, LONGER, arguments, messages, process_of, reported, run, same_weights, torchrun
from tests.trainer.training_helpers import events, iterations

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("program", [solrl_train, with_a_late_rank])
def test_a_refusal_ends_all_ranks_with_one_message(alone: Path, tmp_path: Path, program: Callable[..., None]) -> None:
    words = ["--output" if word == "--resume" else word for word in arguments(alone)]
    assert run(2, words, tmp_path / "log", program) == 1
    (line,) = messages(tmp_path / "log")
    assert "already contains a run" in line
    assert reported(tmp_path / "log") == [(0, 2)]
    assert line.removeprefix("solrl-train: ") in (tmp_path / "log").read_text().partition("Root Cause")[2]


def test_ranks_resume_a_changed_run_only_if_that_is_allowed(alone: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(alone, folder)
    changed = [*arguments(folder, LAST + 1), "--seed", "7"]
    assert run(2, changed, log) == 1
    (line,) = messages(log)
    assert "seed: 42 → 7" in line
    assert "allow the rest by name: --allow-change seed;" in line
    assert run(2, [*changed, "--allow-change", "seed"], log) == 0, log.read_text()
    assert [line["changes"] for line in events(folder, "change")] == [{"seed": [42, 7]}]


def test_mistyped_commands_and_errors_of_all_ranks_are_printed_once(tmp_path: Path) -> None:
    assert run(2, ["run", "--iterationz", "2"], tmp_path / "log") == 1
    assert (tmp_path / "log").read_text().count("--iterationz") == 1
    assert run(3, arguments(tmp_path), tmp_path / "log", with_weights_apart) == 1
    (line,) = messages(tmp_path / "log")
    assert "the adapter after iteration 0 is sha256:" in line
    assert " on rank 0, 2; sha256:" in line
    assert " on rank 1; expected the same on all" in line
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.release
def test_ranks_on_different_kinds_of_device_are_refused(tmp_path: Path) -> None:
    assert run(2, arguments(tmp_path), tmp_path / "log", with_another_device) == 1
    (line,) = messages(tmp_path / "log")
    assert "rank 1 computes on cuda, and rank 0 on cpu; expected the same" in line


@pytest.mark.release
def test_torchrun_restarts_all_ranks_after_a_death_and_the_run_is_the_same(alone: Path, tmp_path: Path) -> None:
    started = torchrun(arguments(tmp_path, LONGER), tmp_path / "log", "--max-restarts", "1")
    while not (tmp_path / "checkpoints" / "000001").exists():
        assert started.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    os.kill(process_of(1, started), signal.SIGKILL)
    assert started.wait(600) == 0, (tmp_path / "log").read_text()
    assert len(messages(tmp_path / "log")) == 1
    assert same_weights(tmp_path, alone)
    assert iterations(tmp_path)[:LAST] == iterations(alone)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[RankPrograms]:
    """Three ranks during a long run."""
    ranks = RankPrograms(3, solrl_train, (arguments(tmp_path, 500),), tmp_path / "log")
    while not (tmp_path / "checkpoints" / "000001").exists():
        assert ranks.alive, (tmp_path / "log").read_text()
        time.sleep(0.02)
    yield ranks
    ranks.stop()


def again(folder: Path) -> str:
    """The end of a message, after variables of this environment."""
    return f"torchrun … -m solrl_trainer run --resume {folder}"


@pytest.mark.parametrize("rank", [0, 2])
def test_torchrun_names_the_rank_that_died(training: RankPrograms, tmp_path: Path, rank: int) -> None:
    training.send(rank, signal.SIGKILL)
    assert training.wait(600) == 1
    assert reported(tmp_path / "log") == [(rank, -signal.SIGKILL)]
    (line,) = messages(tmp_path / "log")
    assert line.startswith("solrl-train: stopped by SIGTERM, which torchrun sends")
    assert line.endswith(again(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_with_one_message(training: RankPrograms, tmp_path: Path, number: int) -> None:
    training.send_signal(number)
    assert training.wait(600) == 1
    (line,) = messages(tmp_path / "log")
    assert line.endswith(again(tmp_path))
    assert ("stopped by Ctrl-C" in line) == (number == signal.SIGINT)
    assert os.listdir(tmp_path / "checkpoints")


def test_only_the_dead_rank_is_reported_if_its_collective_fails_first(tmp_path: Path) -> None:
    assert run(2, arguments(tmp_path), tmp_path / "log", with_a_death_in_a_collective) == 1
    assert reported(tmp_path / "log") == [(1, -9)]
    assert len(messages(tmp_path / "log")) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_sharded_evaluation_ends_the_run(tmp_path: Path, rank: int) -> None:
    words = arguments(tmp_path, LAST, "optimizer.shard_base=true")
    assert RankPrograms(2, with_a_broken_reward, (words, rank), tmp_path / "log").wait(600) == 1
    (line,) = messages(tmp_path / "log")
    named = "" if rank == 0 else f"rank {rank}: "
    assert line.startswith(f"solrl-train: {named}the reward is broken; continue with: ")
    assert line.endswith(again(tmp_path))
    assert reported(tmp_path / "log") == [(rank, 2)]
