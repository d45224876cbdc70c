"""Rollouts over HTTP: repeatable, independent of batching, and the same images as in process."""

import numpy as np
from scipy.stats import spearmanr
from solrl_core.families import Backbone
from solrl_core.fingerprint import SCHEDULE, check_digests, part_digests, schedule_digest
from solrl_core.rewards import RewardSet
from solrl_core.sampling.noise import check_noise_contract
from solrl_proto.models import ModelList
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import RolloutAnswer
from tests.support.service_helpers import RunningService, scores

PROMPTS = ["a red circle", "two blue squares"]


def test_an_answer_has_the_contracts_shape_and_its_seeds_repeat_it(service: RunningService) -> None:
    whole = service.rollout(prompts=PROMPTS, count=30, steps=1)
    answer = RolloutAnswer.model_validate(whole)
    assert (answer.model, answer.adapter, answer.precision) == ("mini-sana", None, "nvfp4")
    assert [group.prompt_id for group in answer.groups] == ["p0", "p1"]
    for group in answer.groups:
        assert list(group.seeds) == expand_seeds(7, group.prompt_id, 30)
        assert len(group.scores) == len(group.rewards["clipscore"]) == 30
        assert group.scores == group.rewards["clipscore"]
        assert group.images is None
    assert min(answer.seconds.queued, answer.seconds.generate, answer.seconds.reward) >= 0
    assert answer.seconds.rewards.keys() == answer.groups[0].rewards.keys()
    assert 0 < sum(one.seconds for one in answer.seconds.rewards.values()) <= answer.seconds.reward
    seeds = [group["seeds"] for group in whole["groups"]]
    assert service.rollout(prompts=PROMPTS, seeds=seeds, steps=1)["groups"] == whole["groups"]


def test_rank_does_not_depend_on_batching(service: RunningService) -> None:
    seeds = list(range(1000, 1096))
    (together,) = scores(service.rollout(seeds=[seeds]))
    # 5 + 91 has other chunk boundaries than 96; 24 + 72 has the same.
    apart = [s for part in (seeds[:5], seeds[5:]) for s in scores(service.rollout(seeds=[part]))[0]]
    order = np.random.default_rng(0).permutation(96)
    (shuffled,) = scores(service.rollout(seeds=[[seeds[i] for i in order]]))
    assert spearmanr(together, apart).statistic >= 0.99
    assert spearmanr(np.array(together)[order], shuffled).statistic >= 0.99
    assert len(set(together)) > 90


def test_models_lists_digests_noise_and_precisions(service: RunningService, backbone: Backbone) -> None:
    listed = ModelList.model_validate(service.client.get("/v1/models").json())
    (model,) = listed.models
    ours = part_digests(backbone.parts) | {SCHEDULE: schedule_digest(backbone.sigmas)}
    ours |= RewardSet.load(["clipscore"], backbone).digests()
    check_digests(model.digests, ours)
    assert set(model.digests) == set(ours)
    check_noise_contract(listed.noise)
    assert (model.name, model.family, model.rewards) == ("mini-sana", "sana", ("clipscore",))
    shares = {info.precision: info.quantized_share for info in model.precisions}
    assert shares["nvfp4"] > 0.8
    assert shares["bf16"] == 0
    how = {info.precision: info.how for info in model.precisions}
    assert "this is CPU" in how["nvfp4"]
    assert how["bf16"] == "bfloat16 weights, float32 arithmetic"


def test_auto_is_the_fastest_native_precision_and_never_an_emulation(service: RunningService) -> None:
    answer = RolloutAnswer.model_validate(service.rollout(precision="auto"))
    assert answer.plan.precision == "auto"
    assert answer.precision == "bf16"
    exact = RolloutAnswer.model_validate(service.rollout(precision="bf16"))
    assert answer.groups == exact.groups
