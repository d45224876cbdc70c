"""Candidates explored on this device: generated and scored as by a service's workers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from solrl_core.image_files import for_showing
from solrl_engine.sampler import Sampler
from solrl_proto.rollouts import PromptItem

from solrl_trainer.rollouts.groups import CandidateGroup, ScoredSamples, flattened
from solrl_trainer.rollouts.sample_scorer import SampleScorer


@dataclass(frozen=True)
class GroupSampler:
    """Generates and scores groups of candidates under the behaviour policy, and may keep them for training.

    Equal devices give the scores of a rollout service if the batch is the service's, `CHUNK_SIZE`. The scorer is of the
    trained rewards, or of all if the candidates are kept.
    """

    sampler: Sampler
    scorer: SampleScorer
    keep: bool = False

    def groups(self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]]) -> list[CandidateGroup]:
        """Generate and score all prompts' groups together; groups have equal size."""
        prompt_of_seed, all_seeds = flattened(prompts, seeds)
        samples: Sequence[ScoredSamples | None] = [None] * len(prompts)
        if self.keep:
            samples = self._samples(prompt_of_seed, all_seeds).split(len(prompts))
            scores = [part.scores.tolist() for part in samples if part is not None]
        else:
            scores = self.scores(prompt_of_seed, all_seeds).view(len(prompts), -1).tolist()
        return list(map(CandidateGroup, prompts, seeds, scores, samples))

    def scores(self, prompts: Sequence[PromptItem], seeds: Sequence[int]) -> torch.Tensor:
        """Scores [N] of the candidates of these seeds."""
        pending = []
        for rows in self._batches(seeds):
            images = self.sampler.sample(prompts[rows], seeds[rows]).images
            pending.append(self.scorer.score_images(prompts[rows], images))
        return torch.cat([scores() for scores in pending])

    def images(self, prompt: PromptItem, seeds: Sequence[int]) -> torch.Tensor:
        """Images of these candidates `for_showing`, float32 in [0, 1]."""
        return for_showing(self.sampler.sample([prompt] * len(seeds), seeds).images).cpu()

    def _samples(self, prompts: Sequence[PromptItem], seeds: Sequence[int]) -> ScoredSamples:
        batches = self._batches(seeds) if self.scorer.overlaps else iter([slice(None)])
        pending = []
        for rows in batches:
            samples = self.sampler.sample(prompts[rows], seeds[rows])
            pending.append(self.scorer.score_samples(prompts[rows], samples))
        return ScoredSamples.join([scored() for scored in pending])

    def _batches(self, seeds: Sequence[int]) -> Iterator[slice]:
        size = self.sampler.batch.size
        return (slice(start, start + size) for start in range(0, len(seeds), size))
