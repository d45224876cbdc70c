"""Candidates explored on this device: generated, pruned and scored as by a service's workers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from solrl_core.image_files import for_showing
from solrl_core.sampling.sampler import Trajectory
from solrl_engine.sampler import Sampler, survivors
from solrl_proto.rollouts import PromptItem

from solrl_trainer.rollouts.groups import CandidateGroup, ScoredSamples, flattened
from solrl_trainer.rollouts.sample_scorer import SampleScorer


@dataclass(frozen=True)
class GroupSampler:
    """Samples groups of candidates under the behaviour policy: generates, prunes and scores them.

    Equal devices give the scores of a rollout service if the batch is the service's, `CHUNK_SIZE`.

    Attributes:
        scorer: scorer of the trained rewards, or of all if the candidates are kept.
        keep: keep the candidates themselves, which training uses as they are. They are not pruned.
    """

    sampler: Sampler
    scorer: SampleScorer
    keep: bool = False

    def groups(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], *, unpruned: bool = False
    ) -> list[CandidateGroup]:
        """Generate and score the groups of these prompts, of equal size, together; prune them if the plan does."""
        each, flat = flattened(prompts, seeds)
        samples: Sequence[ScoredSamples | None] = [None] * len(prompts)
        if self.keep:
            samples = self._samples(each, flat).split(len(prompts))
            scores = [part.scores.tolist() for part in samples if part is not None]
        else:
            scores = self.scores(each, flat, unpruned=unpruned, groups=len(prompts)).view(len(prompts), -1).tolist()
        return list(map(CandidateGroup, prompts, seeds, scores, samples))

    def scores(
        self, prompts: Sequence[PromptItem], seeds: Sequence[int], *, unpruned: bool = False, groups: int = 1
    ) -> torch.Tensor:
        """Scores [N] of the candidates of these seeds, NaN for those that the plan prunes."""
        pruning = None if unpruned else self.sampler.plan().prune
        if pruning is None:
            return self._completed(prompts, seeds)
        trajectory, scores = self.halfway(prompts, seeds, pruning.after)
        return self.finished(prompts, seeds, trajectory, scores, pruning.keep, groups)

    def halfway(
        self, prompts: Sequence[PromptItem], seeds: Sequence[int], after: int
    ) -> tuple[Trajectory, torch.Tensor]:
        """The candidates of these seeds after the first steps, and the scores [N] of the images predicted there."""
        parts, predicted = [], []
        for rows in self._batches(seeds):
            made = self.sampler.sample(prompts[rows], seeds[rows], until=after)
            parts.append(made.trajectory)
            predicted.append(self.scorer.score_images(prompts[rows], made.images))
        return Trajectory.join(parts), torch.cat([scores() for scores in predicted])

    def finished(
        self,
        prompts: Sequence[PromptItem],
        seeds: Sequence[int],
        trajectory: Trajectory,
        predicted: torch.Tensor,
        keep: int,
        groups: int = 1,
    ) -> torch.Tensor:
        """Scores [N] after the last step of the `keep` most extreme candidates of each group, NaN for the others.

        `trajectory` and `predicted` are those of `halfway`.
        """
        size = len(seeds) // groups
        places = [
            group * size + place
            for group, scores_of_group in enumerate(predicted.view(groups, size))
            for place in survivors(scores_of_group, keep)
        ]
        scores = torch.full((len(seeds),), torch.nan)
        scores[places] = self._completed(
            [prompts[place] for place in places], [seeds[place] for place in places], trajectory.rows(places)
        )
        return scores

    def images(self, prompt: PromptItem, seeds: Sequence[int]) -> torch.Tensor:
        """Images of these candidates `for_showing`, float32 in [0, 1]."""
        return for_showing(self.sampler.sample([prompt] * len(seeds), seeds).images).cpu()

    def _completed(
        self, prompts: Sequence[PromptItem], seeds: Sequence[int], start: Trajectory | None = None
    ) -> torch.Tensor:
        pending = []
        for rows in self._batches(seeds):
            images = self.sampler.sample(prompts[rows], seeds[rows], start=start and start.rows(rows)).images
            pending.append(self.scorer.score_images(prompts[rows], images))
        return torch.cat([scores() for scores in pending])

    def _samples(self, prompts: Sequence[PromptItem], seeds: Sequence[int]) -> ScoredSamples:
        batches = self._batches(seeds) if self.scorer.overlaps else iter([slice(None)])
        pending = []
        for rows in batches:
            made = self.sampler.sample(prompts[rows], seeds[rows])
            pending.append(self.scorer.score_samples(prompts[rows], made))
        return ScoredSamples.join([scored() for scored in pending])

    def _batches(self, seeds: Sequence[int]) -> Iterator[slice]:
        size = self.sampler.batch.size
        return (slice(start, start + size) for start in range(0, len(seeds), size))
