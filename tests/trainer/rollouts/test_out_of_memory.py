"""Exhausted memory while images are scored or evaluated: smaller batches, and the same scores."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.generator import Generator, GeneratorOutput
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_proto.rollouts import Plan, PromptItem
from solrl_trainer.evaluation.evaluate import evaluate
from solrl_trainer.ranks.communicator import SingleProcess

PROMPTS = [PromptItem(id=str(number), text=f"{number} circles", metadata={"number": number}) for number in range(3)]


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


class Small(Generator):
    """A generator on a device with memory for only so many candidates."""

    most = 2
    batches: list[int]

    def generate(self, prompt: Any, seeds: Sequence[int], *, batch_limit: int = 24, **rest: Any) -> GeneratorOutput:
        self.batches.append(batch_limit)
        if min(batch_limit, len(seeds)) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().generate(prompt, seeds, batch_limit=batch_limit, **rest)


def scorer(reward: Brightness, batch: AdaptiveBatchSize | None = None) -> Scorer:
    return Scorer(RewardSet({"brightness": reward}), batch)


def test_scoring_is_repeated_with_fewer_images() -> None:
    images = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    notes: list[str] = []
    small, large = Brightness(5), Brightness(24)
    frugal = scorer(small, AdaptiveBatchSize(doing="scoring", on_exhausted=notes.append))
    prompts = [PROMPTS[2]] * 12
    (expected, _), (found, _) = (one.score(["brightness"], images, prompts) for one in (scorer(large), frugal))
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
        scorer(Brightness(0)).score(["brightness"], images, prompts)


def test_an_evaluation_fits_its_batches_into_memory(loaded: Backbone) -> None:
    def evaluated(generator: Generator, reward: Brightness, **noted: Any) -> torch.Tensor:
        sampler = Sampler(generator, lambda: Plan(steps=2), batch=AdaptiveBatchSize(**noted))
        scores = scorer(reward, AdaptiveBatchSize(doing="scoring", **noted))
        return evaluate(sampler, scores, PROMPTS, SingleProcess(), seeds=2).scores["brightness"]

    notes: list[str] = []
    small = Small(loaded, "bf16")
    small.batches = []
    reward = Brightness(1)
    found = evaluated(small, reward, on_exhausted=notes.append)
    expected = evaluated(Generator(loaded, "bf16"), Brightness(24))
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.unique().numel() == found.numel()
    assert small.batches == [24, 3, *[1] * 6]
    assert reward.batches == [6, 3, *[1] * 6]
    assert [note.partition(" images")[0] for note in notes] == [
        "memory ran out generating 6",
        "memory ran out generating 3",
        "memory ran out scoring 6",
        "memory ran out scoring 3",
    ]
