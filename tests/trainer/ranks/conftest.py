"""An uninterrupted run in one process, with which the tests compare runs of several ranks."""

from pathlib import Path

import pytest
from tests.trainer.rank_runs import arguments, run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert run(1, arguments(folder), folder / "log") == 0, (folder / "log").read_text()
    return folder
