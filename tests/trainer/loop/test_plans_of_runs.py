"""Runs whose exploration lags behind."""

from pathlib import Path

import pytest
from real_runs import Run, Service, go, selected
from solrl_client.rollouts import RolloutClient
from solrl_minis import catalog
from solrl_trainer.rollouts.exploration import seed_root
from solrl_trainer.selection import best_worst
from solrl_trainer.service.run_client import run_client
from solrl_trainer.settings.prompts import prompts_of_iteration, read_prompts


@pytest.fixture(scope="module")
def lagging(service: Service, folder: Path) -> Run:
    """A run that explores two versions behind."""
    return go(service, folder / "lagging", "iterations=4", "explore.lag=2", "explore.prompts=1")


def test_a_lag_is_constant_and_recorded(lagging: Run) -> None:
    lines = [line for line in lagging.metrics if line["event"] == "iteration"]
    assert [line["explored_version"] for line in lines] == [0, 0, 0, 1]
    # The stale version selected the last iteration's training seeds.
    config = lagging.config
    prompts = prompts_of_iteration(read_prompts(catalog.prompts(), "train"), 1, config.seed, 3)
    with RolloutClient(config.rollout_url) as client:
        answer = run_client(config, client).candidates_of(prompts, 1, seed_root(config.seed, 3), iteration=3)
    index = best_worst(answer.groups[0].scores, config.explore.keep)
    assert selected(lagging)[0] == [answer.groups[0].seeds[i] for i in index]


def test_a_resumed_lagging_run_is_the_same_bit_for_bit_after_the_service_lost_everything(
    lagging: Run, service: Service, folder: Path
) -> None:
    settings = ("explore.lag=2", "explore.prompts=1")
    part = go(service, folder / "lagging-parts", "iterations=3", *settings)
    with RolloutClient(service.url) as client:
        client.delete(part.config.run)
    resumed = go(service, folder / "lagging-parts", "iterations=4", *settings, resume=True)
    assert resumed.adapter_digest(4) == lagging.adapter_digest(4)
    assert [info.version for info in resumed.held.versions] == [1, 2, 3, 4]
