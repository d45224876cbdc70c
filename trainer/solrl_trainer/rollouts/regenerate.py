"""Regeneration: the samples that an algorithm trains on, from selected seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from solrl_core.generator import Generator, GeneratorOutput
from solrl_core.solver_specs import SolverSpec

from solrl_trainer.rollouts.batch_limit import BatchLimit
from solrl_trainer.rollouts.groups import GroupSamples, GroupSelection, ScoredSamples
from solrl_trainer.rollouts.overlap import Pending


@dataclass(frozen=True)
class Sampler:
    """Draws samples from a generator.

    Attributes:
        generator: generator with a policy merged.
        steps: solver steps.
        solver: returns the run's solver, or that of the training data under the merged version.
        guidance: guidance scale; 1.0 disables guidance.
        record: record every step.
        limit: largest number of samples in a batch.
    """

    generator: Generator
    steps: int
    solver: Callable[[], SolverSpec]
    guidance: float
    record: bool = False
    limit: BatchLimit = field(default_factory=BatchLimit)

    def sample(self, text: str, seeds: Sequence[int]) -> GroupSamples:
        """Generate samples of a prompt, one per seed."""
        generated = self._generate(text, seeds)
        return GroupSamples(generated.latents, generated.images, generated.recording)

    def latents(self, text: str, seeds: Sequence[int]) -> torch.Tensor:
        """Clean latents [N, ...] of the samples alone."""
        return self._generate(text, seeds, decode=False).latents

    def _generate(self, text: str, seeds: Sequence[int], *, decode: bool = True) -> GeneratorOutput:
        return self.limit.run(
            len(seeds),
            lambda size: self.generator.generate(
                text,
                seeds,
                steps=self.steps,
                solver=self.solver(),
                guidance=self.guidance,
                batch_limit=size,
                decode=decode,
                record=self.record,
            ),
        )


class Regenerator(Protocol):
    """Regenerates the candidates of a selection under the behaviour policy, in BF16 and with all steps."""

    def regenerate(self, selection: GroupSelection, iteration: int) -> GroupSamples | Pending[ScoredSamples]:
        """Samples of an iteration's selected seeds, or those that a service is generating and scoring."""


@dataclass(frozen=True)
class LocalRegenerator:
    """Regenerates on this device."""

    sampler: Sampler

    def regenerate(self, selection: GroupSelection, iteration: int) -> GroupSamples:
        """Samples of the selected seeds; samples that were generated locally for training are returned unchanged."""
        if selection.samples is not None:
            return selection.samples
        return self.sampler.sample(selection.prompt.text, selection.seeds)
