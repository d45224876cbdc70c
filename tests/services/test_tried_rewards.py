"""A reward that cannot be used is refused before a model is loaded, by each program that computes rewards."""

from pathlib import Path
from typing import Any

import pytest
from solrl_core.errors import RewardError
from solrl_reward.__main__ import main
from solrl_rollout.engine.model_loading import load_models
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.rollouts import loading
from tests.support.ports import free_port
from tests.support.typed import typed
from tests.trainer.training_helpers import tiny_config

TYPO = "tests.services.faulty_rewards:typo"
SAID = f"reward '{TYPO}' cannot be used: tried on two grey images, it failed on image 0 of prompt"


def unexpected(*_: Any, **__: Any) -> Any:
    pytest.fail("the model is loaded")


def test_a_rollout_service_refuses_it() -> None:
    with pytest.raises(RewardError, match=SAID):
        load_models(RolloutSettings(rewards=("clipscore", TYPO), device="cpu"), RolloutMetrics(), unexpected)


def test_a_run_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_backbone", unexpected)
    config = tiny_config(f"rewards={{clipscore: 1, '{TYPO}': 0}}", output=tmp_path / "run")
    with pytest.raises(RewardError, match=f"{SAID} '(?!two grey)"):
        loading.load(config, Communicator(), lambda waited: None)


def test_a_reward_service_refuses_it() -> None:
    done = typed(main, "serve", "--rewards", TYPO, "--port", str(free_port()), "--device", "cpu")
    assert done.returncode == 2
    said = done.stderr
    assert SAID in said.splitlines()[-1]
