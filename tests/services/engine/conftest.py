"""A Ray cluster, for workers that are actors."""

import os
import sys
from collections.abc import Iterator

import pytest
from tests.support.ray_nodes import ray_nodes


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Programs of the tests join two nodes of two CPUs each."""
    import ray

    nodes, patch = ray_nodes(2, PYTHONPATH=os.pathsep.join(sys.path)), pytest.MonkeyPatch.context()
    with nodes as variables, patch as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        yield
        ray.shutdown()
