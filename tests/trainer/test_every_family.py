"""A whole `sol_rl` run of each miniature with all four rewards, with a service that retains one version per run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.commands import run
from solrl_trainer.evaluation.gallery import load_gallery
from solrl_trainer.loop import Result
from solrl_trainer.policy.update import UpdateFigures, Updater
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
def test_one_reward_determines_the_advantages_all_are_logged_and_explored_images_are_shown(
    model: str,
    trained: str,
    service: RunningService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = ", ".join(f"{name}: {float(name == trained)}" for name in REWARDS)
    folder, settings = tmp_path / model, (*SMALL, f"rewards={{{weights}}}")
    config = run_config(f"{model}/sol_rl/{trained}", folder, *settings, rollout_url=service.url)
    results: list[Result] = []
    samples: list[TrainingSamples] = []
    train, update = run.train, Updater.update

    def kept(*arguments: Any, **options: Any) -> Result:
        results.append(train(*arguments, **options))
        return results[0]

    def watched(self: Updater, training: TrainingSamples, iteration: int, *more: Any) -> UpdateFigures:
        samples.append(training)
        return update(self, training, iteration, *more)

    monkeypatch.setattr(run, "train", kept)
    monkeypatch.setattr(Updater, "update", watched)
    summary = run.run(config)
    rewards = results[0].samples.rewards
    assert rewards.keys() == set(REWARDS)

    def advantages(name: str) -> torch.Tensor:
        rows = rewards[name]
        assert rows.shape == (2, 4)
        means = torch.stack([row.sum() / 4 for row in rows])
        deviation = ((rows - rows.mean()) ** 2).mean().sqrt()
        return torch.cat([(row - mean) / (deviation + 1e-4) for row, mean in zip(rows, means, strict=True)])

    for name in REWARDS:
        close = torch.allclose(samples[0].advantages, advantages(name), atol=1e-4 if name == trained else 1e-2)
        assert close == (name == trained), name
    (iteration,) = events(folder, "iteration")
    assert iteration["rewards"].keys() == set(REWARDS)
    assert len(set(iteration["rewards"].values())) == 4
    evaluations = events(folder, "evaluation")
    assert [line["version"] for line in evaluations] == [0, 1]
    assert all(line["rewards"].keys() == {*REWARDS, "verifier", "verifier_graded", "judge"} for line in evaluations)
    held = service.client.get(f"/v1/runs/{config.run}/adapters").json()
    assert [info["version"] for info in held["versions"]] == [1]
    assert "the report does not show" not in capsys.readouterr().err
    assert json.loads((folder / "result.json").read_text()) == summary
    assert summary["rewards"].keys() == {*REWARDS, "verifier", "verifier_graded", "judge"}
    gallery = load_gallery(folder)
    assert (len(gallery.before), len(gallery.after), len(gallery.pairs)) == (2, 2, 8)
    assert gallery.explored.shape == gallery.before[:1].expand(8, -1, -1, -1).shape
    assert (folder / "grid.png").stat().st_size > 1000
    assert config.preset in (folder / "report.html").read_text()
