"""A service that explores for several ranks, and one that loses their adapter versions."""

from pathlib import Path

import pytest
from tests.support.programs import RankPrograms
from tests.support.service_helpers import RunningService
from tests.trainer.rank_programs import with_a_forgetful_service
from tests.trainer.rank_runs import arguments, run, same_weights
from tests.trainer.training_helpers import iterations

pytestmark = pytest.mark.slow

RANKS, ITERATIONS = 2, 2
LAGGED = ("explore.lag=1", "evaluate.fidelity_prompts=0")


def served(service: RunningService, folder: Path, *settings: str) -> list[str]:
    """Arguments of a run that a service explores."""
    words = arguments(folder, ITERATIONS, "explore.precision=nvfp4", *settings, recipe="sol_rl")
    return [*words, "--rollout-url", service.url, "--run", folder.name]


def train(size: int, service: RunningService, folder: Path, *settings: str) -> None:
    words, log = served(service, folder, *LAGGED, *settings), folder.with_suffix(".log")
    before = service.log.read_text().count("GET /v1/models")
    assert run(size, words, log) == 0, log.read_text()
    assert service.log.read_text().count("GET /v1/models") - before == size, "each rank asks for the models once"


def test_ranks_explore_a_share_beside_a_service(small_service: RunningService, tmp_path: Path) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "ranks"
    train(1, small_service, alone)
    train(RANKS, small_service, folder, "explore.share=0.5")
    assert same_weights(folder, alone, ITERATIONS)
    assert iterations(folder) == iterations(alone)
    lines = [line for line in small_service.log.read_text().splitlines() if f"/v1/runs/{folder.name}/adapters/" in line]
    assert len([line for line in lines if "PUT" in line]) == ITERATIONS + 1, "rank 0 alone pushes"


def test_rank_0_pushes_lost_versions_again_while_another_asks(small_service: RunningService, tmp_path: Path) -> None:
    whole, bereft = tmp_path / "whole", tmp_path / "bereft"
    first, second = (served(small_service, folder, "explore.lag=0", "patience=20") for folder in (whole, bereft))
    assert run(1, first, tmp_path / "first") == 0
    marks, log = ("bereft", str(tmp_path / "explored")), tmp_path / "log"
    assert RankPrograms(2, with_a_forgetful_service, (second, *marks), log).wait(600) == 0, log.read_text()
    held = small_service.client.get("/v1/runs/bereft/adapters").json()
    assert [info["version"] for info in held["versions"]] == [0, 1, 2]
    assert log.read_text().count("the service had lost this run's versions 0 and 1; pushed again") == 1
    assert same_weights(whole, bereft, 2)
