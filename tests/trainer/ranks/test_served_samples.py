"""A service that regenerates the samples of several ranks, and one that loses their adapter versions."""

from pathlib import Path

import pytest
from fault_trials.processes import RankPrograms
from rank_programs import with_a_forgetful_service, with_noted_samples
from rank_runs import arguments, run, same_weights
from service_helpers import RunningService
from training_helpers import iterations

pytestmark = pytest.mark.slow

RANKS, ITERATIONS, PROMPTS = 2, 2, 4
LAGGED = ("explore.lag=1", "evaluate.fidelity_prompts=0")


def served(service: RunningService, folder: Path, *settings: str) -> list[str]:
    """Arguments of a run that a service explores."""
    words = arguments(folder, ITERATIONS, "explore.precision=nvfp4", "explore.prune=null", *settings, recipe="sol_rl")
    return [*words, "--rollout-url", service.url, "--run", folder.name]


def train(size: int, service: RunningService, folder: Path, *settings: str) -> list[list[tuple[int, str]]]:
    """Train with this many ranks; returns version and prompt of each rank's requests for samples."""
    words = served(service, folder, *LAGGED, *settings)
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
def alone(small_service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of one process that regenerates on its own device."""
    folder = tmp_path_factory.mktemp("served") / "alone"
    assert train(1, small_service, folder) == [[]]
    return folder


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.release), 0.5])
def test_ranks_use_a_services_samples(share: float, alone: Path, small_service: RunningService, tmp_path: Path) -> None:
    folder = tmp_path / f"ranks-{share}"
    asked = train(RANKS, small_service, folder, "regenerate.at=service", f"regenerate.share={share}")
    assert same_weights(folder, alone, ITERATIONS)
    assert iterations(folder) == iterations(alone)
    lines = [line for line in small_service.log.read_text().splitlines() if f"/v1/runs/{folder.name}/adapters/" in line]
    assert len([line for line in lines if "PUT" in line]) == ITERATIONS + 1, "rank 0 alone pushes"
    each = int(PROMPTS / RANKS * share)
    # Each rank asks for its own prompts, under the newest version although exploration lags behind it.
    for requests in asked:
        assert sorted(version for version, _ in requests) == sorted([*range(ITERATIONS)] * each)
    assert len({request for requests in asked for request in requests}) == RANKS * ITERATIONS * each


def test_rank_0_pushes_lost_versions_again_while_another_rank_asks(
    small_service: RunningService, tmp_path: Path
) -> None:
    whole, bereft = tmp_path / "whole", tmp_path / "bereft"
    first, second = (served(small_service, folder, "explore.lag=0", "patience=20") for folder in (whole, bereft))
    assert run(1, first, tmp_path / "first") == 0
    marks, log = ("bereft", str(tmp_path / "explored")), tmp_path / "log"
    assert RankPrograms(2, with_a_forgetful_service, (second, *marks), log).wait(600) == 0, log.read_text()
    held = small_service.client.get("/v1/runs/bereft/adapters").json()
    assert [info["version"] for info in held["versions"]] == [0, 1, 2]
    assert log.read_text().count("the service had lost this run's versions 0 and 1; pushed again") == 1
    assert same_weights(whole, bereft, 2)
