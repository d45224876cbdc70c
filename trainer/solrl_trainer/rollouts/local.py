"""Local exploration: full-length candidates on the trainer's device, which are trained on directly."""

import time
from collections.abc import Iterator

from solrl_core.generator import Generator
from solrl_proto.noise import expand_seeds

from solrl_trainer.rollouts.exploration import ExplorationSummary, PromptsOf, seed_root
from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.rollouts.regenerate import Sampler
from solrl_trainer.rollouts.scoring import Scorer


class LocalExplorer:
    """Generates and scores candidates on demand, under the current behaviour policy."""

    def __init__(
        self,
        sampler: Sampler,
        scorer: Scorer,
        prompts_of: PromptsOf,
        *,
        candidates: int,
        seed: int,
    ) -> None:
        """Describe an explorer.

        Args:
            sampler: of the generator with the behaviour policy merged.
            scorer: of samples.
            prompts_of: prompts of an iteration.
            candidates: per prompt.
            seed: of the run.
        """
        self._sampler = sampler
        self._scorer = scorer
        self._prompts_of = prompts_of
        self._candidates = candidates
        self._seed = seed

    def look_ahead(self, version: int) -> None:
        """Do nothing: this device is busy with other work."""

    def explore(self, iteration: int) -> "LocalExploration":
        """The candidates of an iteration."""
        return LocalExploration(self._groups(iteration), iteration, self._sampler.generator)

    def _groups(self, iteration: int) -> Iterator[CandidateGroup]:
        root = seed_root(self._seed, iteration)
        for prompt in self._prompts_of(iteration):
            seeds = expand_seeds(root, prompt.id, self._candidates)
            samples = self._scorer.score(prompt, self._sampler.sample(prompt.text, seeds))
            yield CandidateGroup(prompt, seeds, samples.scores.tolist(), samples)


class LocalExploration:
    """Groups made as they are asked for; see `Exploration`."""

    def __init__(self, groups: Iterator[CandidateGroup], version: int, generator: Generator) -> None:
        self._groups = groups
        self._version = version
        self._generator = generator
        self._score_sum = 0.0
        self._score_count = 0
        self._seconds = 0.0

    def __iter__(self) -> Iterator[CandidateGroup]:
        """Make and yield each group."""
        while True:
            started = time.perf_counter()
            group = next(self._groups, None)
            self._seconds += time.perf_counter() - started
            if group is None:
                return
            assert group.samples is not None
            self._score_sum += float(group.samples.scores.sum())
            self._score_count += len(group.seeds)
            yield group

    @property
    def summary(self) -> ExplorationSummary:
        """Available after the last group."""
        return ExplorationSummary(
            self._version,
            self._generator.precision,
            self._generator.numerics,
            self._score_sum,
            self._score_count,
            self._seconds,
        )
