"""A whole `sol_rl` run of each miniature with all four rewards, with a service that retains one version per run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from solrl_trainer.commands import run
from solrl_trainer.evaluation.gallery import load_gallery
from tests.support.service_helpers import RunningService, running_service
from tests.trainer.training_helpers import QUICK, events, run_config

REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
TRAINED = {"mini-sana": "imagereward", "mini-sd3": "hpsv2", "mini-flux": "pickscore"}
SMALL = (
    *(*QUICK, "explore.candidates=8", "explore.keep=4", "optimizer.updates=1", "optimizer.batch=8"),
    *("optimizer.learning_rate=1e-2", "algorithm.timestep_fraction=0.5", "evaluate.prompts=2"),
    "evaluate.rewards=[verifier, verifier_graded, judge]",
)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with running_service("--rewards", *REWARDS, "--retain", "1", model=list(TRAINED)) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(("model", "trained"), TRAINED.items())
def test_all_rewards_are_logged_and_explored_images_are_shown(
    model: str, trained: str, service: RunningService, tmp_path: Path, notes: list[str]
) -> None:
    weights = ", ".join(f"{name}: {float(name == trained)}" for name in REWARDS)
    folder, settings = tmp_path / model, (*SMALL, f"rewards={{{weights}}}")
    config = run_config(f"{model}/sol_rl/{trained}", folder, *settings, rollout_url=service.url)
    summary = run.run(config)
    (iteration,) = events(folder, "iteration")
    assert iteration["rewards"].keys() == set(REWARDS)
    assert len(set(iteration["rewards"].values())) == 4
    assert iteration["reward_mean"] == iteration["rewards"][trained]
    evaluations = events(folder, "evaluation")
    assert [line["version"] for line in evaluations] == [0, 1]
    for figures in (summary, *evaluations):
        assert figures["rewards"].keys() == {*REWARDS, "verifier", "verifier_graded", "judge"}
    held = service.client.get(f"/v1/runs/{config.run}/adapters").json()
    assert [info["version"] for info in held["versions"]] == [1]
    assert not [note for note in notes if "the report does not show" in note]
    gallery = load_gallery(folder)
    assert (len(gallery.before), len(gallery.after), len(gallery.pairs)) == (2, 2, 8)
    assert gallery.explored.shape == gallery.before[:1].expand(8, -1, -1, -1).shape
