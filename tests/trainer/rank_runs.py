"""Small runs of several ranks, as forked processes or under torchrun."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.ports import free_port
from tests.support.programs import RankPrograms
from tests.support.small_model import small_model
from tests.trainer.rank_programs import solrl_train
from tests.trainer.training_helpers import same, sets, state

SETTINGS = (
    f"model={small_model()}",
    *("lora.rank=2", "lora.alpha=4", "explore.prompts=4", "explore.candidates=6", "explore.keep=4", "explore.steps=2"),
    *("regenerate.steps=4", "optimizer.updates=2", "optimizer.batch=4", "evaluate.prompts=3", "evaluate.seeds=1"),
    *("evaluate.steps=1", "evaluate.rewards=[]", "patience=0", "keep_checkpoints=9"),
)
LAST = 3
LONGER = 9
"""Iterations of a run that is killed after its first; as many checkpoints are kept."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def arguments(folder: Path, iterations: int = LAST, *settings: str, recipe: str = "diffusionnft") -> list[str]:
    words = ["run", "--preset", f"mini-sana/{recipe}/clipscore", "--resume", str(folder)]
    return [*words, "--iterations", str(iterations), *sets(*SETTINGS, *settings)]


def run(size: int, words: list[str], log: Path, program: Callable[..., None] = solrl_train) -> int:
    """Exit code of torchrun for a program's ranks: 0 or 1."""
    return RankPrograms(size, program, (words,), log).wait(600)


def messages(log: Path) -> list[str]:
    """Lines that `solrl-train` prints about its end."""
    return [line for line in log.read_text().splitlines() if line.startswith("solrl-train: ")]


def reported(log: Path) -> list[tuple[int, int]]:
    """Rank and exit code of each failure in torchrun's report."""
    found = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", log.read_text())
    return [(int(rank), int(code)) for rank, code in found]


def same_weights(one: Path, other: Path, version: int = LAST) -> bool:
    """Whether policy and optimiser of two runs are equal, bit for bit."""
    return same(state(one, version), state(other, version))


def torchrun(words: list[str], log: Path, *options: str) -> subprocess.Popen[bytes]:
    """Two ranks, started as a user would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
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
