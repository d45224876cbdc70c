"""One run on two nodes, each with its own `torchrun`, network and folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.ports import free_port
from tests.trainer.rank_runs import LAST, LONGER, ONE_THREAD, arguments, messages, process_of, same_weights
from tests.trainer.training_helpers import iterations

pytestmark = [pytest.mark.slow, pytest.mark.release]

RUN = Path("run")
"""The run's folder, relative to that of each node."""


@dataclass(frozen=True)
class Node:
    """A machine, or what stands for it: its number, words before a command on it, and its working directory."""

    rank: int
    prefix: tuple[str, ...]
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")


@dataclass(frozen=True)
class Network:
    """Two nodes, the address of the first, and the programs that were started on them."""

    nodes: tuple[Node, Node]
    address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> list[subprocess.Popen[bytes]]:
        """Run the command of docs/many-gpus.md on each node."""
        port, programs = str(free_port()), []
        for node in self.nodes:
            node.folder.mkdir(exist_ok=True)
            command = [*node.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--node-rank", str(node.rank), "--master-addr", self.address, "--master-port", port]
            command += ["--nproc-per-node", "1", "-m", "solrl_trainer", *arguments(RUN, LONGER)]
            with node.log.open("wb") as log:
                environment = os.environ | ONE_THREAD
                programs.append(subprocess.Popen(command, cwd=node.folder, env=environment, stdout=log, stderr=log))
        self.started.extend(programs)
        return programs


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Two network namespaces with a cable between them; without the right to make them, both nodes on loopback."""
    names = [f"solrl-{os.getpid()}-{rank}" for rank in range(2)]
    address, prefixes = "127.0.0.2", [(), ()]
    with suppress(OSError, subprocess.CalledProcessError):
        lay_cable(names)
        address, prefixes = "10.213.0.1", [("ip", "netns", "exec", name) for name in names]
    first, second = (Node(rank, prefix, tmp_path / f"node-{rank}") for rank, prefix in enumerate(prefixes))
    found = Network((first, second), address)
    yield found
    for program in found.started:
        program.terminate()
        program.wait(600)
    for name in names:
        with suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "delete", name)


def lay_cable(names: list[str]) -> None:
    for name in names:
        ip("netns", "add", name)
    ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
    for rank, name in enumerate(names):
        ip("-n", name, "address", "add", f"10.213.0.{rank + 1}/24", "dev", "cable")
        for link in ("lo", "cable"):
            ip("-n", name, "link", "set", link, "up")
        ip("netns", "exec", name, "true")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def started(network: Network) -> list[subprocess.Popen[bytes]]:
    """The programs of both nodes, after the first checkpoint."""
    programs = network.start()
    while not (network.nodes[0].folder / RUN / "checkpoints" / "000001").exists():
        logs = [node.log.read_text() for node in network.nodes]
        assert [program.poll() for program in programs] == [None, None], logs
        time.sleep(0.02)
    return programs


@pytest.mark.parametrize("number", range(2))
def test_a_node_that_no_longer_answers_is_named(network: Network, number: int) -> None:
    programs, other = started(network), 1 - number
    silent = [process_of(number, programs[number]), programs[number].pid]
    for pid in silent:
        os.kill(pid, signal.SIGSTOP)  # its connections stay open, as those of a machine without power
    try:
        assert programs[other].wait(600) == 1
    finally:
        for pid in silent:
            os.kill(pid, signal.SIGKILL)
    (line,) = messages(network.nodes[other].log)
    assert ("lost the machine of rank 0" if number == 0 else "lost rank 1 (killed") in line


def test_a_node_that_dies_is_named_and_both_nodes_resume_the_run(network: Network, alone: Path) -> None:
    first, second = network.nodes
    programs = started(network)
    for pid in (process_of(1, programs[1]), programs[1].pid):
        os.kill(pid, signal.SIGKILL)
    assert programs[0].wait(600) != 0
    assert programs[1].wait(600) == -signal.SIGKILL
    (line,) = messages(first.log)
    assert line.startswith("solrl-train: lost rank 1 (killed")
    assert line.endswith(f"torchrun … -m solrl_trainer run --resume {RUN}")
    assert not (first.folder / RUN / "result.json").exists()

    assert [program.wait(600) for program in network.start()] == [0, 0], first.log.read_text()
    assert same_weights(first.folder / RUN, alone)
    assert iterations(first.folder / RUN)[:LAST] == iterations(alone)
    # Rank 0 alone writes and prints, so no storage needs to be shared.
    assert list(second.folder.iterdir()) == []
    assert "continuing after" in first.log.read_text()
    assert "continuing after" not in second.log.read_text()
