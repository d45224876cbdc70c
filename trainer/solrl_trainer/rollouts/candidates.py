"""Candidates of a prompt, generated on this device: by an exploration plan, or full-length for training."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from solrl_core.generator import Generator, GeneratorOutput
from solrl_core.sampler import Trajectory
from solrl_proto.rollouts import Plan, PromptItem
from solrl_proto.selection import best_worst

from solrl_trainer.rollouts.batch_limit import BatchLimit
from solrl_trainer.rollouts.groups import CandidateGroup, ScoredSamples
from solrl_trainer.rollouts.regenerate import Sampler
from solrl_trainer.rollouts.scoring import Scorer


class CandidateMaker(Protocol):
    """Generates and scores the candidates of a prompt under the behaviour policy."""

    @property
    def generator(self) -> Generator:
        """Generator with the behaviour policy merged."""

    def group(self, prompt: PromptItem, seeds: Sequence[int], *, whole: bool = False) -> CandidateGroup:
        """Generate and score the group of these seeds; `whole` disables pruning."""

    def images(self, prompt: PromptItem, seeds: Sequence[int]) -> torch.Tensor:
        """Images of these candidates, float32 [N, 3, H, W] in [0, 1]."""


@dataclass(frozen=True)
class Halfway:
    """Candidates of a group on their way.

    Attributes:
        trajectory: latents from which they continue.
        scores: scores [N] of the clean images predicted here.
    """

    trajectory: Trajectory
    scores: torch.Tensor


@dataclass(frozen=True)
class PlannedCandidates:
    """Candidates by an exploration plan; only their scores are kept.

    Chunks, pruning and scoring are those of a rollout service, so equal devices give equal scores if the limit is the
    service's, `CHUNK_SIZE`.

    Attributes:
        generator: generator with the behaviour policy merged.
        plan: returns the exploration plan under the merged version; the generator sets the precision.
        scorer: scorer of the trained rewards.
        limit: largest number of candidates in a batch.
    """

    generator: Generator
    plan: Callable[[], Plan]
    scorer: Scorer
    limit: BatchLimit = field(default_factory=BatchLimit)

    def group(self, prompt: PromptItem, seeds: Sequence[int], *, whole: bool = False) -> CandidateGroup:
        """Generate and score the group of these seeds; `whole` disables pruning."""
        scores = self.scores(prompt, seeds, whole=whole).tolist()
        return CandidateGroup(prompt, seeds, [None if math.isnan(score) else score for score in scores])

    def scores(self, prompt: PromptItem, seeds: Sequence[int], *, whole: bool = False) -> torch.Tensor:
        """Scores [N] of the candidates of these seeds, NaN for pruned candidates; `whole` disables pruning."""
        prune = None if whole else self.plan().prune
        if prune is None:
            return self._completed(prompt, seeds)
        return self.finished(prompt, seeds, self.halfway(prompt, seeds, prune.after), prune.keep)

    def halfway(self, prompt: PromptItem, seeds: Sequence[int], after: int) -> Halfway:
        """The candidates of these seeds after the first steps of the plan."""
        parts, predicted = [], []
        for rows in _chunks(len(seeds), self.limit):
            made = self._generate(prompt, seeds[rows], until=after)
            parts.append(made.trajectory)
            predicted.append(self.scorer.scores(prompt, made.images))
        return Halfway(Trajectory.join(parts), torch.cat([scores() for scores in predicted]))

    def finished(self, prompt: PromptItem, seeds: Sequence[int], halfway: Halfway, keep: int) -> torch.Tensor:
        """Scores [N] after the last step of the `keep` most extreme candidates, NaN for the others."""
        places = sorted(best_worst(halfway.scores, min(keep, len(seeds))))
        scores = torch.full((len(seeds),), torch.nan)
        scores[places] = self._completed(prompt, [seeds[place] for place in places], halfway.trajectory.rows(places))
        return scores

    def images(self, prompt: PromptItem, seeds: Sequence[int]) -> torch.Tensor:
        """Images of these candidates, float32 [N, 3, H, W] in [0, 1]."""
        return self._generate(prompt, seeds, decoder="whole").images.cpu()

    def _completed(self, prompt: PromptItem, seeds: Sequence[int], start: Trajectory | None = None) -> torch.Tensor:
        pending = []
        for rows in _chunks(len(seeds), self.limit):
            images = self._generate(prompt, seeds[rows], start=start and start.rows(rows)).images
            pending.append(self.scorer.scores(prompt, images))
        return torch.cat([scores() for scores in pending])

    def _generate(
        self,
        prompt: PromptItem,
        seeds: Sequence[int],
        *,
        start: Trajectory | None = None,
        until: int | None = None,
        decoder: Literal["planned", "whole"] = "planned",
    ) -> GeneratorOutput:
        plan = self.plan()
        early = plan.decoder_after(until) if decoder == "planned" else None
        return self.limit.run(
            len(seeds),
            lambda size: self.generator.generate(
                prompt.text,
                seeds,
                steps=plan.steps,
                solver=plan.solver_spec,
                guidance=plan.guidance,
                start=start,
                until=until,
                batch_limit=size,
                early=early,
            ),
        )


@dataclass(frozen=True)
class TrainedCandidates:
    """Full-length candidates, which training uses as they are.

    Attributes:
        sampler: sampler of the generator with the behaviour policy merged.
        scorer: scorer of all rewards, trained or only logged.
    """

    sampler: Sampler
    scorer: Scorer

    @property
    def generator(self) -> Generator:
        """Generator with the behaviour policy merged."""
        return self.sampler.generator

    def group(self, prompt: PromptItem, seeds: Sequence[int], *, whole: bool = False) -> CandidateGroup:
        """Generate and score the group of these seeds; there is no pruning."""
        chunks = _chunks(len(seeds), self.sampler.limit) if self.scorer.overlaps else [slice(None)]
        pending = [self.scorer.score(prompt, self.sampler.sample(prompt.text, seeds[rows])) for rows in chunks]
        samples = ScoredSamples.join([scored() for scored in pending])
        return CandidateGroup(prompt, seeds, samples.scores.tolist(), samples)

    def images(self, prompt: PromptItem, seeds: Sequence[int]) -> torch.Tensor:
        """Images of these candidates, float32 [N, 3, H, W] in [0, 1]."""
        return self.sampler.sample(prompt.text, seeds).images.cpu()


def _chunks(count: int, limit: BatchLimit) -> Iterator[slice]:
    size = limit.size
    return (slice(start, start + size) for start in range(0, count, size))
