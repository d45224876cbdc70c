"""Candidates by an exploration plan, and images scored or evaluated: in batches that fit into memory."""

from collections.abc import Mapping, Sequence
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
from solrl_trainer.settings.config import RunConfig

PROMPT = PromptItem(id="p", text="a red circle")
OTHER = PromptItem(id="q", text="two blue squares")
PROMPTS = [PromptItem(id=str(number), text=f"{number} circles", metadata={"number": number}) for number in range(3)]
SEEDS = range(CHUNK_SIZE + 6)
EACH, OTHERS = [PROMPT] * len(SEEDS), [OTHER] * len(SEEDS)
PLAN = Plan(steps=4)


def maker_of(generator: Any, plan: Plan, scorer: SampleScorer, batch: AdaptiveBatchSize | None = None) -> GroupSampler:
    sampler = Sampler(generator, lambda: plan, batch=batch or AdaptiveBatchSize())
    return GroupSampler(sampler, scorer)


@pytest.fixture(scope="module")
def generator(loaded: Backbone) -> Generator:
    return Generator(loaded, "bf16")


@pytest.fixture(scope="module")
def scorer(loaded: Backbone) -> SampleScorer:
    return SampleScorer(
        Scorer(RewardSet.load(["clipscore"], loaded)),
        ["clipscore"],
        [RewardSpec(name="clipscore")],
        SideStream(torch.device("cpu")),
    )


def test_candidates_have_the_scores_of_their_group_and_images(generator: Generator, scorer: SampleScorer) -> None:
    maker = maker_of(generator, PLAN, scorer)
    group, other = maker.groups([PROMPT, OTHER], [SEEDS, SEEDS])
    assert (group.prompt, list(group.seeds), group.samples) == (PROMPT, list(SEEDS), None)
    assert torch.equal(torch.tensor(other.scores), maker.scores(OTHERS, SEEDS))
    scores = maker.scores(EACH, SEEDS)
    assert torch.allclose(torch.tensor(group.scores), scores, atol=1e-4)
    again = scorer.score_images(EACH[3:9], maker.images(PROMPT, SEEDS[3:9]))()
    assert torch.allclose(again, scores[3:9], atol=1e-4)


class Small:
    """A generator on a device with memory for only so many candidates."""

    precision = "bf16"

    def __init__(self, generator: Generator, most: int) -> None:
        self.generator, self.backbone = generator, generator.backbone
        self.most = most
        self.batches: list[int] = []

    def generate(self, prompt: str, seeds: Sequence[int], *, batch_limit: int, **settings: Any) -> GeneratorOutput:
        self.batches.append(batch_limit)
        if min(batch_limit, len(seeds)) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.generator.generate(prompt, seeds, batch_limit=batch_limit, **settings)


def test_batches_are_halved_if_memory_runs_out(generator: Generator, scorer: SampleScorer) -> None:
    notes: list[str] = []
    small = Small(generator, 7)
    maker = maker_of(small, PLAN, scorer, AdaptiveBatchSize(on_exhausted=notes.append))
    found = maker.scores(EACH, SEEDS)
    expected = maker_of(generator, PLAN, scorer).scores(EACH, SEEDS)
    assert torch.allclose(found, expected, atol=1e-5)
    assert small.batches == [24, 12, *[6] * 5]
    assert [note.partition(":")[0] for note in notes] == [
        "memory ran out generating 24 images at once; the limit is now 12",
        "memory ran out generating 12 images at once; the limit is now 6",
    ]
    sampler = Sampler(Small(generator, 0), lambda: Plan(steps=2))  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        sampler.sample([PROMPT] * 2, [1, 2])
    assert sampler.batch.size == 1
    # No batch is larger than the setting.
    small = Small(generator, 100)
    found = maker_of(small, PLAN, scorer, AdaptiveBatchSize(size=16)).scores(EACH, SEEDS)
    assert torch.allclose(found, expected, atol=1e-5)
    assert small.batches == [16, 16]
    assert RunConfig.model_fields["batch"].default == CHUNK_SIZE  # a service's


def test_a_sharded_generator_does_not_try_a_smaller_batch() -> None:
    def work(rows: slice) -> None:
        raise torch.OutOfMemoryError

    limit = AdaptiveBatchSize(retries=False)
    with pytest.raises(torch.OutOfMemoryError):
        limit.run(CHUNK_SIZE, work)
    assert limit.size == CHUNK_SIZE


class Brightness:
    """A reward on a device with memory for only so many images. It reads text and metadata, too."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.batches: list[int] = []

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        assert len(images) == len(prompts) == len(metadata)
        self.batches.append(len(images))
        if len(images) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        extra = [len(text) + item["number"] for text, item in zip(prompts, metadata, strict=True)]
        return images.mean((1, 2, 3)) + torch.tensor(extra)


def scorer_of(reward: Brightness, batch: AdaptiveBatchSize | None = None) -> Scorer:
    return Scorer(RewardSet({"brightness": reward}), batch)


def test_scoring_is_repeated_with_fewer_images() -> None:
    images = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    notes: list[str] = []
    small, large = Brightness(5), Brightness(24)
    frugal = scorer_of(small, AdaptiveBatchSize(doing="scoring", on_exhausted=notes.append))
    prompts = [PROMPTS[2]] * 12
    (expected, _), (found, _) = (one.score(["brightness"], images, prompts) for one in (scorer_of(large), frugal))
    assert torch.equal(found["brightness"], expected["brightness"])
    assert (small.batches, large.batches) == ([12, 6, 3, 3, 3, 3], [12])
    assert [note.partition(":")[0] for note in notes] == [
        "memory ran out scoring 12 images at once; the limit is now 6",
        "memory ran out scoring 6 images at once; the limit is now 3",
    ]
    small.batches.clear()
    frugal.score(["brightness"], images, prompts)
    assert small.batches == [3] * 4
    with pytest.raises(torch.OutOfMemoryError):
        scorer_of(Brightness(0)).score(["brightness"], images, prompts)
