"""Local exploration: candidates generated on the trainer's device, in turns with its other phases."""

import time
from collections.abc import Iterator, Sequence

import torch
from solrl_core.sampling.generator import Generator
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import PromptItem

from solrl_trainer.rollouts.candidates import CandidateMaker
from solrl_trainer.rollouts.exploration import ExplorationSummary, ExploredImages, PromptsOf, seed_root
from solrl_trainer.rollouts.groups import CandidateGroup, parts_of


class LocalExplorer:
    """Explores on demand, under the newest version of the behaviour policy."""

    def __init__(self, maker: CandidateMaker, prompts_of: PromptsOf, *, candidates: int, seed: int) -> None:
        """Set up an explorer.

        Args:
            maker: generates and scores candidates.
            prompts_of: prompts of an iteration.
            candidates: number of candidates per prompt.
            seed: seed of the run.
        """
        self._maker = maker
        self._prompts_of = prompts_of
        self._candidates = candidates
        self._seed = seed

    def prefetch(self, version: int, *, beyond: bool = True) -> None:
        """Do nothing: this device is busy with other work."""

    def explore(self, iteration: int) -> "LocalExploration":
        """The candidates of an iteration."""
        groups = self._groups(self._prompts_of(iteration), seed_root(self._seed, iteration))
        return LocalExploration(groups, iteration, self._maker.sampler.generator)

    def unpruned_groups(
        self, prompts: Sequence[PromptItem], version: int, root: int, iteration: int
    ) -> list[CandidateGroup]:
        """Explore the groups of these prompts without pruning; `root` is the root of their seeds."""
        return list(self._groups(prompts, root, prune=False))

    def images_of(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], version: int, iteration: int
    ) -> ExploredImages:
        """Images of the given candidates of each prompt."""
        started = time.perf_counter()
        parts = [self._maker.images(prompt, own) for prompt, own in zip(prompts, seeds, strict=True)]
        return ExploredImages(torch.cat(parts), time.perf_counter() - started)

    def _groups(self, prompts: Sequence[PromptItem], root: int, *, prune: bool = True) -> Iterator[CandidateGroup]:
        sampler = self._maker.sampler
        per_batch = sampler.batch.groups(self._candidates, sampler.generator.backbone.device)
        for part in parts_of(prompts, per_batch):
            seeds = [expand_seeds(root, prompt.id, self._candidates) for prompt in part]
            yield from self._maker.groups(part, seeds, prune=prune)


class LocalExploration:
    """Groups that are generated on demand; see `Exploration`."""

    def __init__(self, groups: Iterator[CandidateGroup], iteration: int, generator: Generator) -> None:
        self._groups = groups
        self._iteration = iteration
        self._generator = generator
        self._score_sum = 0.0
        self._score_count = 0
        self._seconds = 0.0

    def __iter__(self) -> Iterator[CandidateGroup]:
        """Generate and yield each group."""
        while True:
            started = time.perf_counter()
            group = next(self._groups, None)
            self._seconds += time.perf_counter() - started
            if group is None:
                return
            scores = [score for score in group.scores if score is not None]
            # Scores without samples are summed in float64, like a service's; samples in float32.
            self._score_sum += sum(scores) if group.samples is None else float(group.samples.scores.sum())
            self._score_count += len(scores)
            yield group

    @property
    def summary(self) -> ExplorationSummary:
        """Available after the last group."""
        return ExplorationSummary(
            self._iteration,
            self._iteration,  # without lag, the version has the same number
            self._generator.precision,
            self._generator.numerics,
            self._score_sum,
            self._score_count,
            self._seconds,
        )
