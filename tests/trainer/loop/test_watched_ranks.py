"""Rank fidelity along a run: when it is measured, what is noted, and what a resumed run repeats."""

from pathlib import Path

import pytest
from solrl_trainer.evaluation import held_out
from solrl_trainer.service.service_source import ServiceSource
from tests.trainer.real_runs import Run, Service, Watcher, go

WATCHED = ("explore.prompts=1", "evaluate.prompts=2", "checkpoint_every=1", "evaluate.fidelity_every=1")


@pytest.fixture(scope="module")
def watched(service: Service, folder: Path) -> Run:
    """A run that is watched before each of its three iterations, and required to have more than it can have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "LEAST_FIDELITY", 1.0)
        return go(service, folder / "watched", *WATCHED, "iterations=3")


def measured(run: Run) -> dict[int, float]:
    lines = [line for line in run.metrics if line["event"] == "fidelity"]
    found = {line["version"]: line["spearman"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_every_version_that_explores_is_measured_and_one_note_says_what_to_do(watched: Run, service: Service) -> None:
    found = measured(watched)
    assert list(found) == [0, 1, 2]
    assert len(set(found.values())) > 1
    assert watched.result.spearman == found
    (note,) = [note for note in watched.watcher.notes if "rank fidelity is below" in note]
    assert "below 1, " in note
    assert "explore.steps" in note
    assert "explore.lag" not in note
    detail = service.running.client.get(f"/v1/runs/{watched.config.run}/iterations").json()
    assert detail["curve"]["series"]["spearman"] == pytest.approx(list(found.values()), rel=1e-4)


def test_a_resumed_run_measures_none_again_and_fewer_if_told(watched: Run, service: Service, folder: Path) -> None:
    output = folder / "cut"
    with pytest.raises(KeyboardInterrupt):
        go(service, output, *WATCHED, "iterations=3", watcher=Watcher(stops_at=(1, "explore")))
    resumed = go(service, output, *WATCHED, "iterations=4", "evaluate.fidelity_every=2", resume=True)
    assert [version for version, name in resumed.watcher.phases if name == "fidelity"] == [2]
    assert measured(resumed) == measured(watched)
    assert resumed.result.spearman == measured(watched)
    assert resumed.adapter_digest(3) == watched.adapter_digest(3)


def test_a_lagging_run_is_measured_as_explored(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    roots = set()
    groups_of = ServiceSource.groups_of

    def noted(self: ServiceSource, prompts: object, version: int, root: int, iteration: int) -> object:
        asked.append((version, iteration))
        roots.add(root)
        return groups_of(self, prompts, version, root, iteration)  # type: ignore[arg-type]

    monkeypatch.setattr(ServiceSource, "groups_of", noted)
    monkeypatch.setattr(held_out, "LEAST_FIDELITY", 1.0)
    settings = (*WATCHED, "iterations=3", "explore.lag=1")
    watcher = Watcher()
    go(service, folder / "late", *settings, watcher=watcher)
    assert asked == [(0, 0), (0, 1), (1, 2)]
    assert len(roots) == 1
    (note,) = [note for note in watcher.notes if "rank fidelity is below" in note]
    assert "lower explore.lag" in note
