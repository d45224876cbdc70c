"""A service regenerates the samples of several ranks: the weights of one process that regenerates them itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_trials.processes import RankPrograms
from rank_programs import with_noted_samples
from rank_runs import SETTINGS, same_weights
from service_helpers import RunningService, running_service
from small_model import small_model
from training_helpers import iterations

pytestmark = pytest.mark.slow

RANKS, ITERATIONS, PROMPTS = 2, 2, 4
LAGGED = ("explore.precision=nvfp4", "explore.prune=null", "explore.lag=1", "evaluate.fidelity_prompts=0")


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with running_service(model=small_model()) as running:
        yield running


def train(size: int, service: RunningService, folder: Path, *settings: str) -> list[list[tuple[int, str]]]:
    """Train with this many ranks; returns version and prompt of each rank's requests for samples."""
    words = ["run", "--preset", "mini-sana/sol_rl/clipscore", "--iterations", str(ITERATIONS)]
    words += ["--rollout-url", service.url, "--run", folder.name, "--output", str(folder)]
    words += [word for setting in (*SETTINGS, *LAGGED, *settings) for word in ("--set", setting)]
    noted, log = folder.with_suffix(".asked"), folder.with_suffix(".log")
    ranks = RankPrograms(size, with_noted_samples, (words, str(noted)), log)
    assert ranks.wait(600) == 0, log.read_text()
    assert "differ by rounding" not in log.read_text()
    return [_requests(Path(f"{noted}-{rank}")) for rank in range(size)]


def _requests(path: Path) -> list[tuple[int, str]]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = [(int(version), prompt) for version, prompt, kept in map(str.split, lines) if kept == "4"]
    assert len(found) == len(lines)
    return found


@pytest.fixture(scope="module")
def alone(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of one process that regenerates on its own device."""
    folder = tmp_path_factory.mktemp("served") / "alone"
    assert train(1, service, folder) == [[]]
    return folder


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.release), 0.5])
def test_ranks_train_the_same_weights_on_samples_of_a_service(
    share: float, alone: Path, service: RunningService, tmp_path: Path
) -> None:
    folder = tmp_path / f"ranks-{share}"
    asked = train(RANKS, service, folder, "regenerate.at=service", f"regenerate.share={share}")
    assert same_weights(folder, alone, ITERATIONS)
    assert iterations(folder) == iterations(alone)
    lines = [line for line in service.log.read_text().splitlines() if f"/v1/runs/{folder.name}/adapters/" in line]
    assert len([line for line in lines if "PUT" in line]) == ITERATIONS + 1, "rank 0 alone pushes"
    each = int(PROMPTS / RANKS * share)
    # Each rank asks for its own prompts, under the newest version although exploration lags behind it.
    for requests in asked:
        assert sorted(version for version, _ in requests) == sorted([*range(ITERATIONS)] * each)
    assert len({request for requests in asked for request in requests}) == RANKS * ITERATIONS * each
