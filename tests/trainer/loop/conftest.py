"""A service for each file of tests, and an uninterrupted run with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.real_runs import Run, Service, go
from tests.trainer.run_folders import iteration_line, write_lines


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    found = Service()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(service: Service, folder: Path) -> Run:
    """Two uninterrupted iterations, in a folder where a run stopped before its first checkpoint."""
    output = folder / "whole"
    output.mkdir()
    write_lines(output, [iteration_line(0) | {"loss": 99}])
    return go(service, output, "iterations=2")
