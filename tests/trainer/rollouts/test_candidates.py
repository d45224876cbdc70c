"""Candidates by an exploration plan, in batches that fit into memory."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_core.sampling.generator import Generator, GeneratorOutput
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import SideStream
from solrl_proto.rollouts import Plan, PromptItem, RewardSpec
from solrl_trainer.rollouts.candidates import GroupSampler
from solrl_trainer.rollouts.sample_scorer import SampleScorer

PROMPT = PromptItem(id="p", text="a red circle")
OTHER = PromptItem(id="q", text="two blue squares")
SEEDS = range(CHUNK_SIZE + 6)
EACH, OTHERS = [PROMPT] * len(SEEDS), [OTHER] * len(SEEDS)
PLAN = Plan(steps=4)


@pytest.fixture(scope="module")
def generator(loaded: Backbone) -> Generator:
    return Generator(loaded, "bf16")


def test_candidates_have_the_scores_of_their_group_and_images(generator: Generator) -> None:
    rewards = RewardSet.load(["clipscore"], generator.backbone)
    trained, stream = [RewardSpec(name="clipscore")], SideStream(torch.device("cpu"))
    scorer = SampleScorer(Scorer(rewards), ["clipscore"], trained, stream)
    maker = GroupSampler(Sampler(generator, lambda: PLAN), scorer)
    group, other = maker.groups([PROMPT, OTHER], [SEEDS, SEEDS])
    assert (group.prompt, list(group.seeds), group.samples) == (PROMPT, list(SEEDS), None)
    assert torch.equal(torch.tensor(other.scores), maker.scores(OTHERS, SEEDS))
    scores = maker.scores(EACH, SEEDS)
    assert torch.allclose(torch.tensor(group.scores), scores, atol=1e-4)
    again = scorer.score_images(EACH[3:9], maker.images(PROMPT, SEEDS[3:9]))()
    assert torch.allclose(again, scores[3:9], atol=1e-4)


def test_batches_are_halved_if_memory_runs_out(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    make = generator.generate

    def small(prompts: Sequence[str], seeds: Sequence[int], **settings: Any) -> GeneratorOutput:
        sizes.append(len(seeds))
        if len(seeds) > 7:
            raise torch.OutOfMemoryError
        return make(prompts, seeds, **settings)

    sampler = Sampler(generator, lambda: Plan(steps=1))
    expected = sampler.sample(EACH, SEEDS).latents
    monkeypatch.setattr(generator, "generate", small)
    assert torch.allclose(sampler.sample(EACH, SEEDS).latents, expected, atol=1e-4)
    assert sizes == [24, 12, *[6] * 5]


def test_a_sharded_generator_does_not_try_a_smaller_batch() -> None:
    def work(rows: slice) -> None:
        raise torch.OutOfMemoryError

    limit = AdaptiveBatchSize(retries=False)
    with pytest.raises(torch.OutOfMemoryError):
        limit.run(CHUNK_SIZE, work)
    assert limit.size == CHUNK_SIZE
