"""Nodes of a Ray cluster on this machine. As a program, they run until its input ends."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OBJECT_STORE = 80 * 2**20
"""Bytes of shared memory of a node; Ray accepts no less than 75 MiB."""


@contextmanager
def ray_nodes(count: int, **environment: str) -> Iterator[dict[str, str]]:
    """Run nodes of two CPUs each, and no GPU.

    Args:
        count: number of nodes.
        environment: additional variables of their workers.

    Yields:
        The variables with which a program joins them. Others, who do not have the token, cannot.
    """
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # By default, workers give way to every other process of the machine.
    equal = {"RAY_worker_niceness": "0"}
    nodes = subprocess.Popen(
        [sys.executable, str(Path(__file__)), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | access | equal | environment,
        text=True,
    )
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        said = [line for line in nodes.stdout.readline().split() if line]
        if len(said) != 1:
            raise RuntimeError("the Ray nodes did not start; see the error above")
        yield access | {"RAY_ADDRESS": said[0]}
    finally:
        nodes.stdin.close()
        nodes.wait(60)


def main() -> None:
    """Run as many nodes as the first argument says, and print their address."""
    from ray.cluster_utils import Cluster

    nothing = os.open(os.devnull, os.O_WRONLY)
    printed = os.dup(1)
    os.dup2(nothing, 1)  # Ray's own output
    node = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": _OBJECT_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    for _ in range(int(sys.argv[1]) - 1):
        cluster.add_node(**node)
    os.write(printed, f"{cluster.address}\n".encode())
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
