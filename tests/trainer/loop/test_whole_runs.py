"""Uninterrupted runs: phases, metrics, versions, and evaluations."""

import torch
from real_runs import Run


def test_a_run_goes_through_its_phases(whole: Run) -> None:
    each = ("explore", "regenerate", "train", "push")
    # The evaluations before and after show their progress.
    assert whole.watcher.measured.count(0) == whole.watcher.measured.count(1) == 2
    for iteration in (0, 1):
        *gathering, train, push = (name for i, name in whole.watcher.phases if i == iteration and name in each)
        assert (train, push) == ("train", "push")
        # A group is regenerated as soon as it arrives.
        assert gathering[:2] == ["explore", "regenerate"]
        assert set(gathering) == {"explore", "regenerate"}
    assert [record.iteration for record in whole.watcher.records] == [0, 1]
    assert set(each) | {"evaluate", "total"} <= whole.result.seconds.keys()


def test_it_says_at_its_start_who_does_what(whole: Run) -> None:
    first = whole.watcher.notes[0]
    assert first.startswith(f"loading {whole.config.model}; layout: 1 ")
    assert first.endswith(f" regenerates and trains; {whole.config.service_url} explores (lag 0)")


def test_its_metrics_describe_this_run_and_no_earlier_one(whole: Run) -> None:
    events = [(line["event"], line["version"]) for line in whole.metrics]
    each = [(event, version) for version in (1, 2) for event in ("iteration", "push")]
    assert events == [("evaluation", 0), ("fidelity", 0), *each, ("evaluation", 2)]
    for line in whole.metrics:
        if line["event"] == "iteration":
            assert (line["precision"], line["numerics"]) == ("nvfp4", "emulated")
            assert line["explored_version"] == line["iteration"]
            assert line["seconds"].keys() == {"explore", "wait", "regenerate", "train"}
            assert line["rewards"].keys() == {"clipscore"}
            assert line["loss"] < 99
            assert line["grad_norm"] > 0
            assert line["reward_best"] >= line["reward_worst"] - 0.05


def test_every_version_is_pushed_to_the_service(whole: Run) -> None:
    versions = {info.version: info for info in whole.held.versions}
    assert list(versions) == [0, 1, 2]
    assert [info.parent for info in versions.values()] == [None, 0, 1]
    assert len({info.digest for info in versions.values()}) == 3
    for version in (1, 2):
        logged = next(line for line in whole.metrics if line["event"] == "iteration" and line["version"] == version)
        assert versions[version].digest == whole.adapter_digest(version) == logged["digest"]


def test_the_base_is_evaluated_before_and_the_average_after(whole: Run) -> None:
    before, after = whole.result.before, whole.result.after
    assert before.scores.keys() == after.scores.keys() == {"clipscore", "verifier", "verifier_graded", "judge"}
    assert before.scores["clipscore"].shape == (4, 1)
    assert len(whole.result.prompts) == len(before.images) == 4
    assert not torch.equal(before.scores["clipscore"], after.scores["clipscore"])
    assert list(whole.result.spearman) == [0]
    assert -1 <= whole.result.spearman[0] <= 1
