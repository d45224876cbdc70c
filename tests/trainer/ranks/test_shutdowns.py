"""Early ends of a run of several ranks: all ranks exit with one message, and the resumed run is the same."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_trials.processes import RankPrograms
from rank_programs import (
    solrl_train,
    with_a_broken_reward,
    with_a_death_in_a_collective,
    with_a_lost_error,
    with_another_device,
    with_late_news,
    with_weights_apart,
)
from rank_runs import LAST, LONGER, arguments, iterations, messages, process_of, run, same_weights, torchrun
from solrl_trainer.records.metrics_file import read_metrics

pytestmark = pytest.mark.slow


def test_a_refusal_ends_all_ranks_with_one_message(alone: Path, tmp_path: Path) -> None:
    words = ["--output" if word == "--resume" else word for word in arguments(alone)]
    assert run(2, words, tmp_path / "log") == [2, 2]
    log = (tmp_path / "log").read_text()
    assert log.splitlines() == [line for line in log.splitlines() if line.startswith("solrl-train: ")][:1], log
    assert "already contains a run" in log


def test_ranks_resume_a_changed_run_only_if_that_is_allowed(alone: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(alone, folder)
    changed = [*arguments(folder, LAST + 1), "--seed", "7"]
    assert run(2, changed, log) == [2, 2]
    (line,) = messages(log)
    assert "seed: 42 → 7" in line
    assert "allow the rest by name: --allow-change seed;" in line
    assert run(2, [*changed, "--allow-change", "seed"], log) == [0, 0], log.read_text()
    assert [line["changes"] for line in read_metrics(folder / "metrics.jsonl") if line["event"] == "change"] == [
        {"seed": [42, 7]}
    ]


def test_a_mistyped_command_is_refused_once(tmp_path: Path) -> None:
    codes = run(2, ["run", "--iterationz", "2"], tmp_path / "log")
    assert codes == [2, 0]
    assert (tmp_path / "log").read_text().count("--iterationz") == 1


def test_ranks_with_different_weights_stop(tmp_path: Path) -> None:
    assert run(2, arguments(tmp_path), tmp_path / "log", with_weights_apart) == [2, 2]
    (line,) = [one for one in (tmp_path / "log").read_text().splitlines() if one.startswith("solrl-train: ")]
    assert "the adapter after iteration 0 is sha256:" in line
    assert " on rank 0; sha256:" in line
    assert " on rank 1; expected the same on all" in line
    assert not (tmp_path / "checkpoints").exists()


def test_ranks_on_different_kinds_of_device_are_refused(tmp_path: Path) -> None:
    assert run(2, arguments(tmp_path), tmp_path / "log", with_another_device) == [2, 2]
    assert "rank 1 computes on cuda, and rank 0 on cpu; expected the same" in (tmp_path / "log").read_text()


def test_torchrun_restarts_all_ranks_after_a_death_and_the_run_is_the_same(alone: Path, tmp_path: Path) -> None:
    started = torchrun(arguments(tmp_path, LONGER), tmp_path / "log", "--max-restarts", "1")
    while not (tmp_path / "checkpoints" / "000001").exists():
        assert started.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    os.kill(process_of(1, started), signal.SIGKILL)
    assert started.wait(600) == 0, (tmp_path / "log").read_text()
    assert len(messages(tmp_path / "log")) == 1
    assert messages(tmp_path / "log")[0].startswith("solrl-train: rank 1 died")
    assert same_weights(tmp_path, alone)
    assert iterations(tmp_path)[:LAST] == iterations(alone)


@pytest.fixture
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RankPrograms]:
    """Two ranks during a long run, of `solrl-train` or the given program."""
    program = getattr(request, "param", solrl_train)
    ranks = RankPrograms(2, program, (arguments(tmp_path, 500),), tmp_path / "log")
    while not (tmp_path / "checkpoints" / "000001").exists():
        assert ranks.alive, (tmp_path / "log").read_text()
        time.sleep(0.02)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_on_any_rank_stops_all_ranks(training: RankPrograms, tmp_path: Path, rank: int) -> None:
    training.send(rank, signal.SIGINT)
    assert training.wait(600) == [130, 130]
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    (line,) = [one for one in log.splitlines() if one.startswith("solrl-train: ")]
    again = f"continue with: torchrun … -m solrl_trainer run --resume {tmp_path}"
    assert line == f"solrl-train: stopped by Ctrl-C on rank {rank}; {again}"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_ranks_and_is_named(training: RankPrograms, tmp_path: Path, rank: int) -> None:
    training.kill(rank)
    codes = training.wait(600)
    assert codes == [-9 if other == rank else 2 for other in range(2)]
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    (line,) = [one for one in log.splitlines() if one.startswith("solrl-train: ")]
    assert line.startswith(f"solrl-train: rank {rank} died")


@pytest.mark.parametrize("training", [solrl_train, with_a_lost_error], indirect=True)
def test_a_terminated_rank_ends_all_ranks(training: RankPrograms, tmp_path: Path) -> None:
    training.send(1, signal.SIGTERM)
    codes = training.wait(600)
    assert codes == [143, 143], (tmp_path / "log").read_text()
    assert "solrl-train: stopped by a signal on rank 1" in (tmp_path / "log").read_text()
    assert os.listdir(tmp_path / "checkpoints")


def test_the_dead_rank_is_named_even_if_its_collective_fails_first(tmp_path: Path) -> None:
    """Rank 0 sees the network's error six seconds before it learns of the death."""
    assert run(2, arguments(tmp_path), tmp_path / "log", with_a_death_in_a_collective) == [2, -9]
    (line,) = messages(tmp_path / "log")
    assert line.startswith("solrl-train: rank 1 died")


def test_the_dead_rank_is_named_even_if_torchrun_ends_the_others_first(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to rank 0 six seconds before rank 0 learns of the death."""
    ranks = RankPrograms(2, with_late_news, (arguments(tmp_path, 500),), tmp_path / "log")
    while not (tmp_path / "checkpoints" / "000001").exists():
        assert ranks.alive, (tmp_path / "log").read_text()
        time.sleep(0.02)
    ranks.kill(1)
    ranks.send(0, signal.SIGTERM)
    assert ranks.wait(600) == [2, -9]
    (line,) = messages(tmp_path / "log")
    assert line.startswith("solrl-train: rank 1 died")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_sharded_evaluation_ends_the_run(tmp_path: Path, rank: int) -> None:
    words = [*arguments(tmp_path), "--set", "optimizer.shard_base=true"]
    assert RankPrograms(2, with_a_broken_reward, (words, rank), tmp_path / "log").wait(600) == [2, 2]
    (line,) = messages(tmp_path / "log")
    named = "" if rank == 0 else f"rank {rank}: "
    assert line.startswith(f"solrl-train: {named}the reward is broken; continue with")
