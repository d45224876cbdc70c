"""Candidates generated on this device: by an exploration plan, or full-length for training."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from solrl_core.generator import Generator, GeneratorOutput
from solrl_core.sampler import Trajectory
from solrl_proto.rollouts import AS_TRAINED, Plan, PromptItem
from solrl_proto.selection import best_worst

from solrl_trainer.rollouts.batch_limit import BatchLimit
from solrl_trainer.rollouts.groups import CandidateGroup, Prompts, ScoredSamples, flattened, one_each
from solrl_trainer.rollouts.regenerate import Sampler
from solrl_trainer.rollouts.scoring import Scorer


class CandidateMaker(Protocol):
    """Generates and scores the candidates of prompts under the behaviour policy."""

    @property
    def generator(self) -> Generator:
        """Generator with the behaviour policy merged."""

    @property
    def limit(self) -> BatchLimit:
        """Largest number of candidates in a batch."""

    def groups(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], *, whole: bool = False
    ) -> list[CandidateGroup]:
        """Generate and score the groups of these prompts, of equal size, together; `whole` disables pruning."""

    def images(self, prompt: PromptItem, seeds: Sequence[int]) -> torch.Tensor:
        """Images of these candidates, float32 [N, 3, H, W] in [0, 1]."""


@dataclass(frozen=True)
class Halfway:
    """Candidates on their way.

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

    def groups(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], *, whole: bool = False
    ) -> list[CandidateGroup]:
        """Generate and score the groups of these prompts, of equal size, together; `whole` disables pruning."""
        each, flat = flattened(prompts, seeds)
        scores = self.scores(each, flat, whole=whole, groups=len(prompts)).view(len(prompts), -1).tolist()
        return [
            CandidateGroup(prompt, own, [None if math.isnan(score) else score for score in group])
            for prompt, own, group in zip(prompts, seeds, scores, strict=True)
        ]

    def scores(self, prompt: Prompts, seeds: Sequence[int], *, whole: bool = False, groups: int = 1) -> torch.Tensor:
        """Scores [N] of the candidates of these seeds, NaN for pruned candidates; `whole` disables pruning."""
        prune = None if whole else self.plan().prune
        if prune is None:
            return self._completed(prompt, seeds)
        return self.finished(prompt, seeds, self.halfway(prompt, seeds, prune.after), prune.keep, groups)

    def halfway(self, prompt: Prompts, seeds: Sequence[int], after: int) -> Halfway:
        """The candidates of these seeds after the first steps of the plan."""
        prompts, parts, predicted = one_each(prompt, len(seeds)), [], []
        for rows in _chunks(len(seeds), self.limit):
            made = self._generate(prompts[rows], seeds[rows], until=after)
            parts.append(made.trajectory)
            predicted.append(self.scorer.scores(prompts[rows], made.images))
        return Halfway(Trajectory.join(parts), torch.cat([scores() for scores in predicted]))

    def finished(
        self, prompt: Prompts, seeds: Sequence[int], halfway: Halfway, keep: int, groups: int = 1
    ) -> torch.Tensor:
        """Scores [N] after the last step of the `keep` most extreme candidates of each group, NaN for the others."""
        prompts, size = one_each(prompt, len(seeds)), len(seeds) // groups
        kept = [best_worst(scores, min(keep, size)) for scores in halfway.scores.view(groups, size)]
        places = [group * size + place for group, own in enumerate(kept) for place in sorted(own)]
        scores = torch.full((len(seeds),), torch.nan)
        scores[places] = self._completed(
            [prompts[place] for place in places],
            [seeds[place] for place in places],
            halfway.trajectory.rows(places),
        )
        return scores

    def images(self, prompt: PromptItem, seeds: Sequence[int]) -> torch.Tensor:
        """Images of these candidates, float32 [N, 3, H, W] in [0, 1]."""
        return self._generate(prompt, seeds, decoder="whole").images.cpu()

    def _completed(self, prompt: Prompts, seeds: Sequence[int], start: Trajectory | None = None) -> torch.Tensor:
        prompts, pending = one_each(prompt, len(seeds)), []
        for rows in _chunks(len(seeds), self.limit):
            images = self._generate(prompts[rows], seeds[rows], start=start and start.rows(rows)).images
            pending.append(self.scorer.scores(prompts[rows], images))
        return torch.cat([scores() for scores in pending])

    def _generate(
        self,
        prompt: Prompts,
        seeds: Sequence[int],
        *,
        start: Trajectory | None = None,
        until: int | None = None,
        decoder: Literal["planned", "whole"] = "planned",
    ) -> GeneratorOutput:
        plan = self.plan()
        decoding = plan.decoding_after(until) if decoder == "planned" else AS_TRAINED
        return self.limit.run(
            len(seeds),
            lambda size: self.generator.generate(
                [one.text for one in one_each(prompt, len(seeds))],
                seeds,
                steps=plan.steps,
                solver=plan.solver_spec,
                guidance=plan.guidance,
                start=start,
                until=until,
                batch_limit=size,
                decoding=decoding,
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

    @property
    def limit(self) -> BatchLimit:
        """Largest number of candidates in a batch."""
        return self.sampler.limit

    def groups(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], *, whole: bool = False
    ) -> list[CandidateGroup]:
        """Generate and score the groups of these prompts, of equal size, together; there is no pruning."""
        each, flat = flattened(prompts, seeds)
        chunks = _chunks(len(flat), self.limit) if self.scorer.overlaps else [slice(None)]
        pending = [
            self.scorer.score(each[rows], self.sampler.sample([prompt.text for prompt in each[rows]], flat[rows]))
            for rows in chunks
        ]
        samples = ScoredSamples.join([scored() for scored in pending]).split(len(prompts))
        return [
            CandidateGroup(prompt, own, group.scores.tolist(), group)
            for prompt, own, group in zip(prompts, seeds, samples, strict=True)
        ]

    def images(self, prompt: PromptItem, seeds: Sequence[int]) -> torch.Tensor:
        """Images of these candidates, float32 [N, 3, H, W] in [0, 1]."""
        return self.sampler.sample(prompt.text, seeds).images.cpu()


def _chunks(count: int, limit: BatchLimit) -> Iterator[slice]:
    size = limit.size
    return (slice(start, start + size) for start in range(0, count, size))
