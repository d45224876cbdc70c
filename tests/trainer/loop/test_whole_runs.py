"""Uninterrupted runs: phases, metrics, versions, and the seeds and images of the last iteration."""

import base64

import pytest
import torch
from real_runs import Run, Service, samples, selected, selections
from solrl_client.rollouts import RolloutClient
from solrl_core.image_files import from_file
from solrl_minis import catalog
from solrl_proto.rollouts import AdapterRef, Candidates, Plan, RewardSpec, RolloutAnswer, RolloutRequest
from solrl_trainer.rollouts.exploration import seed_root
from solrl_trainer.selection import best_worst
from solrl_trainer.service.run_client import run_client
from solrl_trainer.settings.prompts import prompts_of_iteration, read_prompts


@pytest.fixture(scope="module")
def asked_again(whole: Run, service: Service) -> tuple[RolloutAnswer, list[torch.Tensor]]:
    """The service's answer to the last iteration's request, and its BF16 images of the selected seeds."""
    config = whole.config
    prompts = prompts_of_iteration(read_prompts(catalog.prompts(), "train"), 2, config.seed, 1)
    with RolloutClient(service.url) as client:
        answer = run_client(config, client).candidates_of(prompts, 1, seed_root(config.seed, 1), iteration=1)
        images = client.rollouts(
            RolloutRequest(
                model="mini-sana",
                adapter=AdapterRef(run=config.run, version=1),
                prompts=tuple(prompts),
                candidates=Candidates(seeds=tuple(tuple(seeds) for seeds in selected(whole))),
                plan=Plan(steps=config.regenerate.steps, precision="bf16"),
                rewards=(RewardSpec(name="clipscore"),),
                images="png",
            )
        )
    return answer, [
        torch.stack([from_file(base64.b64decode(image)) for image in group.images or ()]) for group in images.groups
    ]


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


def test_the_kept_seeds_have_the_best_and_worst_scores_of_the_service(
    whole: Run, asked_again: tuple[RolloutAnswer, list[torch.Tensor]]
) -> None:
    answer, _ = asked_again
    for group, selection in zip(answer.groups, selections(whole), strict=True):
        assert group.prompt_id == selection.prompt.id
        index = best_worst(group.scores, 4)
        assert selection.seeds == [group.seeds[i] for i in index]
        assert selection.scores == pytest.approx([group.scores[i] for i in index])


def test_a_regenerated_candidate_is_the_services_bf16_image_of_its_seed(
    whole: Run, asked_again: tuple[RolloutAnswer, list[torch.Tensor]]
) -> None:
    ours = torch.stack([group.samples.images for group in samples(whole).groups])
    assert ours.shape == (2, 4, 3, 64, 64)
    theirs = torch.stack(asked_again[1])
    # The service's PNGs are additionally rounded to whole values.
    assert float((ours - theirs).abs().max()) <= 1.5 / 255
    assert float((ours - theirs.roll(1, 1)).abs().max()) > 0.01
