"""A whole `sol_rl` run of each miniature with all four rewards, with a service that retains one version per run."""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.commands import run
from solrl_trainer.evaluation.gallery import load_gallery
from solrl_trainer.loop import Result
from solrl_trainer.policy.update import UpdateFigures, Updater
from solrl_trainer.settings.config import RunConfig
from tests.support.service_helpers import RunningService, running_service
from tests.trainer.training_helpers import QUICK, events, run_config

REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
TRAINED = {"mini-sana": "imagereward", "mini-sd3": "hpsv2", "mini-flux": "pickscore"}
SMALL = (
    *(*QUICK, "explore.candidates=8", "explore.keep=4", "optimizer.updates=1", "optimizer.batch=8"),
    *("optimizer.learning_rate=1e-2", "algorithm.timestep_fraction=0.5", "evaluate.prompts=2"),
    "evaluate.rewards=[verifier, verifier_graded, judge]",
)


@dataclass(frozen=True)
class Finished:
    """A finished run: its settings, its result and notes, and its training samples."""

    config: RunConfig
    summary: dict[str, Any]
    said: str
    result: Result
    samples: TrainingSamples

    @property
    def trained(self) -> str:
        return TRAINED[self.config.model]


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with running_service("--rewards", *REWARDS, "--retain", "1", model=list(TRAINED)) as running:
        yield running


@pytest.fixture(scope="module", params=TRAINED)
def finished(
    request: pytest.FixtureRequest, service: RunningService, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    model, trained = request.param, TRAINED[request.param]
    weights = ", ".join(f"{name}: {float(name == trained)}" for name in REWARDS)
    output, settings = tmp_path_factory.mktemp("runs") / model, (*SMALL, f"rewards={{{weights}}}")
    config = run_config(f"{model}/sol_rl/{trained}", output, *settings, rollout_url=service.url)
    results: list[Result] = []
    samples: list[TrainingSamples] = []
    said = io.StringIO()
    train, update = run.train, Updater.update

    def kept(*arguments: Any, **options: Any) -> Result:
        results.append(train(*arguments, **options))
        return results[0]

    def watched(self: Updater, training: TrainingSamples, iteration: int, *more: Any) -> UpdateFigures:
        samples.append(training)
        return update(self, training, iteration, *more)

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.setattr(run, "train", kept)
        patch.setattr(Updater, "update", watched)
        summary = run.run(config)
    return Finished(config, summary, said.getvalue(), results[0], samples[0])


def test_only_the_trained_reward_determines_the_advantages(finished: Finished) -> None:
    rewards = finished.result.samples.rewards
    assert rewards.keys() == set(REWARDS)

    def advantages(name: str) -> torch.Tensor:
        rows = rewards[name]
        assert rows.shape == (2, 4)
        means = torch.stack([row.sum() / 4 for row in rows])
        deviation = ((rows - rows.mean()) ** 2).mean().sqrt()
        return torch.cat([(row - mean) / (deviation + 1e-4) for row, mean in zip(rows, means, strict=True)])

    assert torch.allclose(finished.samples.advantages, advantages(finished.trained), atol=1e-4)
    for name in set(REWARDS) - {finished.trained}:
        assert not torch.allclose(finished.samples.advantages, advantages(name), atol=1e-2), name


@pytest.mark.slow
def test_all_rewards_are_logged_and_explored_images_are_shown(finished: Finished, service: RunningService) -> None:
    folder, run = finished.config.output, finished.config.run
    (iteration,) = events(folder, "iteration")
    assert iteration["rewards"].keys() == set(REWARDS)
    assert len(set(iteration["rewards"].values())) == 4
    evaluations = events(folder, "evaluation")
    assert [line["version"] for line in evaluations] == [0, 1]
    assert all(line["rewards"].keys() == {*REWARDS, "verifier", "verifier_graded", "judge"} for line in evaluations)
    held = service.client.get(f"/v1/runs/{run}/adapters").json()
    assert [info["version"] for info in held["versions"]] == [1]
    assert "the report does not show" not in finished.said
    assert json.loads((folder / "result.json").read_text()) == finished.summary
    assert finished.summary["rewards"].keys() == {*REWARDS, "verifier", "verifier_graded", "judge"}
    gallery = load_gallery(folder)
    assert (len(gallery.before), len(gallery.after), len(gallery.pairs)) == (2, 2, 8)
    assert gallery.explored.shape == gallery.before[:1].expand(8, -1, -1, -1).shape
    assert (folder / "grid.png").stat().st_size > 1000
    assert finished.config.preset in (folder / "report.html").read_text()
