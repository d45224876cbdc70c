"""Candidates explored on this device: generated, pruned and scored as by a service's workers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from solrl_core.sampling.sampler import Trajectory
from solrl_engine.sampler import Sampler, survivors
from solrl_proto.rollouts import PromptItem

from solrl_trainer.rollouts.groups import CandidateGroup, ScoredSamples, flattened
from solrl_trainer.rollouts.scoring import SampleScorer


@dataclass(frozen=True)
class PartialTrajectories:
    """Candidates at the pruning step.

    Attributes:
        trajectory: latents from which they continue.
        scores: scores [N] of the clean images predicted here.
    """

    trajectory: Trajectory
    scores: torch.Tensor


@dataclass(frozen=True)
class CandidateMaker:
    """Generates and scores the candidates of prompts under the behaviour policy.

    Equal devices give the scores of a rollout service if the batch is the service's, `CHUNK_SIZE`.

    Attributes:
        sampler: sampler of the exploration plan.
        scorer: scorer of the trained rewards, or of all if the candidates are kept.
        keep: keep the candidates themselves, which training uses as they are. They are not pruned.
    """

    sampler: Sampler
    scorer: SampleScorer
    keep: bool = False

    def groups(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], *, prune: bool = True
    ) -> list[CandidateGroup]:
        """Generate and score the groups of these prompts, of equal size, together; prune them if the plan does."""
        each, flat = flattened(prompts, seeds)
        if self.keep:
            samples = self._samples(each, flat).split(len(prompts))
            return [
                CandidateGroup(prompt, own, group.scores.tolist(), group)
                for prompt, own, group in zip(prompts, seeds, samples, strict=True)
            ]
        scores = self.scores(each, flat, prune=prune, groups=len(prompts)).view(len(prompts), -1).tolist()
        return [
            CandidateGroup(prompt, own, [None if math.isnan(score) else score for score in group])
            for prompt, own, group in zip(prompts, seeds, scores, strict=True)
        ]

    def scores(
        self, prompts: Sequence[PromptItem], seeds: Sequence[int], *, prune: bool = True, groups: int = 1
    ) -> torch.Tensor:
        """Scores [N] of the candidates of these seeds, NaN for those that the plan prunes."""
        pruning = self.sampler.plan().prune if prune else None
        if pruning is None:
            return self._completed(prompts, seeds)
        return self.finished(prompts, seeds, self.halfway(prompts, seeds, pruning.after), pruning.keep, groups)

    def halfway(self, prompts: Sequence[PromptItem], seeds: Sequence[int], after: int) -> PartialTrajectories:
        """The candidates of these seeds after the first steps of the plan."""
        parts, predicted = [], []
        for rows in self._batches(seeds):
            made = self.sampler.sample(prompts[rows], seeds[rows], until=after)
            parts.append(made.trajectory)
            predicted.append(self.scorer.scores(prompts[rows], made.images))
        return PartialTrajectories(Trajectory.join(parts), torch.cat([scores() for scores in predicted]))

    def finished(
        self,
        prompts: Sequence[PromptItem],
        seeds: Sequence[int],
        halfway: PartialTrajectories,
        keep: int,
        groups: int = 1,
    ) -> torch.Tensor:
        """Scores [N] after the last step of the `keep` most extreme candidates of each group, NaN for the others."""
        size = len(seeds) // groups
        places = [
            group * size + place
            for group, own in enumerate(halfway.scores.view(groups, size))
            for place in survivors(own, keep)
        ]
        scores = torch.full((len(seeds),), torch.nan)
        scores[places] = self._completed(
            [prompts[place] for place in places],
            [seeds[place] for place in places],
            halfway.trajectory.rows(places),
        )
        return scores

    def images(self, prompt: PromptItem, seeds: Sequence[int]) -> torch.Tensor:
        """Images of these candidates, float32 [N, 3, H, W] in [0, 1]."""
        return self.sampler.sample([prompt] * len(seeds), seeds, decode="exact").images.cpu()

    def _completed(
        self, prompts: Sequence[PromptItem], seeds: Sequence[int], start: Trajectory | None = None
    ) -> torch.Tensor:
        pending = []
        for rows in self._batches(seeds):
            images = self.sampler.sample(prompts[rows], seeds[rows], start=start and start.rows(rows)).images
            pending.append(self.scorer.scores(prompts[rows], images))
        return torch.cat([scores() for scores in pending])

    def _samples(self, prompts: Sequence[PromptItem], seeds: Sequence[int]) -> ScoredSamples:
        batches = self._batches(seeds) if self.scorer.overlaps else iter([slice(None)])
        pending = [
            self.scorer.score(prompts[rows], self.sampler.sample(prompts[rows], seeds[rows])) for rows in batches
        ]
        return ScoredSamples.join([scored() for scored in pending])

    def _batches(self, seeds: Sequence[int]) -> Iterator[slice]:
        size = self.sampler.batch.size
        return (slice(start, start + size) for start in range(0, len(seeds), size))
