"""Several processes train one run: any number gives the same weights, and an early end gives one message."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_trials.processes import RankPrograms
from rank_programs import held_bytes, solrl_train, with_a_slow_rank, with_another_device, with_weights_apart
from safetensors.torch import load_file
from solrl_trainer.metrics import read_metrics
from support.ports import free_port

pytestmark = pytest.mark.slow

SETTINGS = (
    *("lora.rank=2", "lora.alpha=4", "explore.prompts=4", "explore.candidates=6", "explore.keep=4", "explore.steps=2"),
    *("regenerate.steps=4", "optimizer.updates=2", "optimizer.batch=4", "evaluate.prompts=3", "evaluate.seeds=1"),
    *("evaluate.steps=1", "evaluate.rewards=[]", "patience=0", "keep_checkpoints=9"),
)
LAST = 3
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
CLOCKED = ("time", "seconds")


def arguments(folder: Path, iterations: int = LAST) -> list[str]:
    """Arguments of a run with local exploration."""
    words = ["run", "--preset", "mini-sana/diffusionnft/clipscore", "--resume", str(folder)]
    words += ["--iterations", str(iterations)]
    return [*words, *(word for setting in SETTINGS for word in ("--set", setting))]


def run(size: int, words: list[str], log: Path, program: Callable[..., None] = solrl_train) -> list[int]:
    """Exit codes of a program's ranks."""
    return RankPrograms(size, program, (words,), log).wait(120)


def state(folder: Path, version: int = LAST) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "checkpoints" / f"{version:06d}" / "state.safetensors")
    return found


def iterations(folder: Path) -> list[dict[str, Any]]:
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["event"] == "iteration"]
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert run(1, arguments(folder), folder / "log") == [0], (folder / "log").read_text()
    return folder


@pytest.fixture(scope="module")
def together(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that two processes started and four continued."""
    folder = tmp_path_factory.mktemp("together")
    assert run(2, arguments(folder, 1), folder / "log") == [0, 0], (folder / "log").read_text()
    assert run(4, arguments(folder), folder / "log") == [0] * 4, (folder / "log").read_text()
    return folder


def test_two_processes_and_then_four_give_the_weights_of_one_bit_for_bit(alone: Path, together: Path) -> None:
    for version in range(1, LAST + 1):
        expected, found = state(alone, version), state(together, version)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert iterations(together) == iterations(alone)
    assert (together / "lora.safetensors").read_bytes() == (alone / "lora.safetensors").read_bytes()


def test_ranks_share_two_stages_without_a_service(tmp_path: Path) -> None:
    extra = ("explore.source=local", "explore.precision=nvfp4", "explore.prune={after: 1, keep: 4}")
    sets = [word for setting in (*extra, "evaluate.fidelity_prompts=2") for word in ("--set", setting)]
    folders = {size: tmp_path / str(size) for size in (1, 2)}
    for size, folder in folders.items():
        words = [*arguments(folder, 1), "--preset", "mini-sana/sol_rl/clipscore", *sets]
        assert run(size, words, tmp_path / "log") == [0] * size, (tmp_path / "log").read_text()
    expected, found = (state(folder, 1) for folder in folders.values())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert iterations(folders[1]) == iterations(folders[2])
    assert iterations(folders[1])[0]["precision"] == "nvfp4"
    results = [json.loads((folder / "result.json").read_text()) for folder in folders.values()]
    assert results[0]["spearman"] == results[1]["spearman"]


def test_a_sharded_base_gives_the_same_weights(alone: Path, tmp_path: Path) -> None:
    """Three ranks have unequal numbers of prompts and micro-batches, so each waits in passes of the others."""
    words = [*arguments(tmp_path), "--set", "optimizer.shard_base=true", "--set", "optimizer.checkpointing=1"]
    assert run(3, words, tmp_path / "log") == [0, 0, 0], (tmp_path / "log").read_text()
    assert "the base is sharded across 3 ranks" in (tmp_path / "log").read_text()
    expected, found = state(alone), state(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert iterations(tmp_path) == iterations(alone)


def test_each_rank_holds_its_part_of_the_base(tmp_path: Path) -> None:
    held = {}
    for setting in ("true", "false"):
        words = ["--set", f"optimizer.shard_base={setting}"]
        codes = RankPrograms(2, held_bytes, (words, str(tmp_path / setting)), tmp_path / "log").wait(120)
        assert codes == [0, 0], (tmp_path / "log").read_text()
        held[setting] = [json.loads((tmp_path / f"{setting}-{rank}").read_text()) for rank in range(2)]
    for spread, whole in zip(held["true"], held["false"], strict=True):
        # Half of the policy's weights and half of the generator's, which share some of the whole ones.
        assert spread["base"] < 0.66 * whole["base"]
        assert whole["process"] - spread["process"] > 0.3 * whole["base"]


def test_only_rank_0_prints(together: Path) -> None:
    log = (together / "log").read_text()
    for line in ("loading mini-sana", "continuing after 1 iterations", "writing the report"):
        assert log.count(line) == (1 if line.startswith("continuing") else 2), log


def test_several_ranks_evaluate_and_calibrate_like_one(alone: Path, together: Path, tmp_path: Path) -> None:
    words = ["evaluate", str(together), "--prompts", "3", "--seeds", "2", "--steps", "2"]
    assert run(2, words, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    shared = json.loads((together / "evaluation" / "evaluation.json").read_text())
    assert run(1, [words[0], str(alone), *words[2:]], tmp_path / "log") == [0], (tmp_path / "log").read_text()
    own = json.loads((alone / "evaluation" / "evaluation.json").read_text())
    assert shared["rewards"]["clipscore"] == pytest.approx(own["rewards"]["clipscore"], abs=1e-6)
    assert (shared["prompts"], shared["version"]) == (3, LAST)


def test_a_refusal_ends_all_ranks_with_one_message(alone: Path, tmp_path: Path) -> None:
    words = ["--output" if word == "--resume" else word for word in arguments(alone)]
    assert run(2, words, tmp_path / "log") == [2, 2]
    log = (tmp_path / "log").read_text()
    assert log.splitlines() == [line for line in log.splitlines() if line.startswith("solrl-train: ")][:1], log
    assert "already contains a run" in log


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


def test_ranks_wait_for_a_late_rank_outside_the_collectives(alone: Path, tmp_path: Path) -> None:
    """A rank that waits for its candidates longer than the time limit of a collective."""
    assert run(2, arguments(tmp_path, 1), tmp_path / "log", with_a_slow_rank) == [0, 0], (tmp_path / "log").read_text()
    assert torch.equal(state(tmp_path, 1)["optimizer/0/exp_avg"], state(alone, 1)["optimizer/0/exp_avg"])


def torchrun(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Two ranks, started as a user would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "-m", "solrl_trainer", *words]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | ONE_THREAD)


def process_of(rank: int, started: subprocess.Popen[bytes]) -> int:
    """Process id of a rank that torchrun started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == started.pid and f"RANK={rank}\0" in (path / "environ").read_text().replace("LOCAL_RANK", ""):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank}")


def test_torchrun_ends_if_a_rank_is_killed_and_the_resumed_run_is_the_same(alone: Path, tmp_path: Path) -> None:
    started = torchrun(arguments(tmp_path), tmp_path / "log")
    while not (tmp_path / "checkpoints" / "000001").exists():
        assert started.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    os.kill(process_of(1, started), signal.SIGKILL)
    assert started.wait(60) != 0
    log = (tmp_path / "log").read_text()
    assert log.count("solrl-train: rank 1 died") == 1, log
    assert not (tmp_path / "result.json").exists()
    assert run(2, arguments(tmp_path), tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    found = state(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in state(alone).items())
    assert iterations(tmp_path) == iterations(alone)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[RankPrograms]:
    """Two ranks during a long run."""
    ranks = RankPrograms(2, solrl_train, (arguments(tmp_path, 500),), tmp_path / "log")
    while not (tmp_path / "checkpoints" / "000001").exists():
        assert ranks.alive, (tmp_path / "log").read_text()
        time.sleep(0.02)
    yield ranks
    ranks.stop()


def test_ctrl_c_on_any_rank_stops_all_ranks(training: RankPrograms, tmp_path: Path) -> None:
    training.send(1, signal.SIGINT)
    assert training.wait(60) == [130, 130]
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    (line,) = [one for one in log.splitlines() if one.startswith("solrl-train: ")]
    again = f"continue with: torchrun … -m solrl_trainer run --resume {tmp_path}"
    assert line == f"solrl-train: stopped by Ctrl-C on rank 1; {again}"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_ranks_and_is_named(training: RankPrograms, tmp_path: Path, rank: int) -> None:
    training.kill(rank)
    codes = training.wait(60)
    assert codes == [-9 if other == rank else 2 for other in range(2)]
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    (line,) = [one for one in log.splitlines() if one.startswith("solrl-train: ")]
    assert line.startswith(f"solrl-train: rank {rank} died")


def test_a_terminated_rank_ends_all_ranks(training: RankPrograms, tmp_path: Path) -> None:
    training.send(1, signal.SIGTERM)
    codes = training.wait(60)
    assert codes == [143, 143], (tmp_path / "log").read_text()
    assert "solrl-train: stopped by a signal on rank 1" in (tmp_path / "log").read_text()
    assert os.listdir(tmp_path / "checkpoints")
