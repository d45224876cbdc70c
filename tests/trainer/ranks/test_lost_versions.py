"""A service that loses the adapter versions of a run of several ranks."""

from pathlib import Path

import pytest
from fault_trials.processes import RankPrograms
from rank_programs import solrl_train, with_a_forgetful_service
from rank_runs import SETTINGS, same_weights
from service_helpers import running_service
from small_model import small_model


@pytest.mark.slow
def test_rank_0_pushes_lost_versions_again_while_another_rank_asks(tmp_path: Path) -> None:
    words = ["run", "--preset", "mini-sana/sol_rl/clipscore", "--iterations", "2"]
    settings = (*SETTINGS, "explore.precision=nvfp4", "explore.prune=null", "explore.lag=0", "patience=20")
    words += [word for setting in settings for word in ("--set", setting)]
    whole, bereft = tmp_path / "whole", tmp_path / "bereft"
    with running_service(model=small_model()) as service:
        words += ["--rollout-url", service.url]
        own = [*words, "--run", "whole", "--output", str(whole)]
        assert RankPrograms(1, solrl_train, (own,), tmp_path / "first").wait(600) == 0
        own = [*words, "--run", "bereft", "--output", str(bereft)]
        marks, log = ("bereft", str(tmp_path / "explored")), tmp_path / "log"
        assert RankPrograms(2, with_a_forgetful_service, (own, *marks), log).wait(600) == 0, log.read_text()
        held = service.client.get("/v1/runs/bereft/adapters").json()
    assert [info["version"] for info in held["versions"]] == [0, 1, 2]
    assert log.read_text().count("the service had lost this run's versions 0 and 1; pushed again") == 1
    assert same_weights(whole, bereft, 2)
