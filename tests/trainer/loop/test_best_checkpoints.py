"""The checkpoint of the best held-out reward outlives newer ones, and a note names it."""

from pathlib import Path

import pytest
from real_runs import Service, go
from solrl_trainer.records.run_log import RunLog

SETTINGS = ("explore.prompts=1", "evaluate.prompts=2", "evaluate.every=1", "keep_checkpoints=1", "iterations=3")


def test_the_best_evaluated_version_is_kept(service: Service, folder: Path) -> None:
    run = go(service, folder / "best", *SETTINGS)
    name = next(iter(run.config.weights))
    found = {line["version"]: line["rewards"][name] for line in run.metrics if line["event"] == "evaluation"}
    assert set(found) == {0, 1, 2, 3}
    best = max((1, 2), key=found.__getitem__)
    assert sorted(path.name for path in (run.config.output / "checkpoints").iterdir()) == [f"{best:06d}", "000003"]
    notes = [note for note in run.watcher.notes if "--checkpoint" in note]
    assert len(notes) == (found[best] > found[3])


def test_a_reward_that_fell_is_noted(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLog, "held_out", lambda own, weights: {1: 0.75, 2: 0.5, 3: 0.25})
    run = go(service, folder / "fell", *SETTINGS)
    (note,) = [note for note in run.watcher.notes if "--checkpoint" in note]
    assert "higher at version 1, 0.7500 instead of 0.2500" in note
    assert f"solrl-train export {run.config.output} --checkpoint 1" in note
