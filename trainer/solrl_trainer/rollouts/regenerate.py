"""Regeneration: the samples that an algorithm trains on, from selected seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from solrl_core.generator import Generator, GeneratorOutput
from solrl_core.solver_specs import SolverSpec

from solrl_trainer.rollouts.batch_limit import BatchLimit
from solrl_trainer.rollouts.groups import GroupSamples, GroupSelection, ScoredSamples, flattened
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

    def sample(self, text: str | Sequence[str], seeds: Sequence[int]) -> GroupSamples:
        """Generate samples of a prompt, or of one prompt for each seed."""
        generated = self._generate(text, seeds)
        return GroupSamples(generated.latents, generated.images, generated.recording)

    def latents(self, text: str, seeds: Sequence[int]) -> torch.Tensor:
        """Clean latents [N, ...] of the samples alone."""
        return self._generate(text, seeds, decode=False).latents

    def _generate(self, text: str | Sequence[str], seeds: Sequence[int], *, decode: bool = True) -> GeneratorOutput:
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
    """Regenerates selected candidates under the behaviour policy, in BF16 and with all steps."""

    def together(self, kept: int) -> int:
        """Number of selections of `kept` seeds to regenerate together."""

    def regenerate(self, selections: Sequence[GroupSelection], iteration: int) -> GroupSamples | Pending[ScoredSamples]:
        """Samples of the seeds of an iteration's selections, or those that a service is generating and scoring."""


@dataclass(frozen=True)
class LocalRegenerator:
    """Regenerates on this device."""

    sampler: Sampler

    def together(self, kept: int) -> int:
        """Number of selections that fill a batch."""
        return self.sampler.limit.groups(kept, self.sampler.generator.backbone.device)

    def regenerate(self, selections: Sequence[GroupSelection], iteration: int) -> GroupSamples:
        """Samples of the selected seeds; samples that were generated locally for training are returned unchanged."""
        made = [selection.samples for selection in selections if selection.samples is not None]
        if made:
            return ScoredSamples.join(made)
        prompts, seeds = flattened([one.prompt for one in selections], [one.seeds for one in selections])
        return self.sampler.sample([prompt.text for prompt in prompts], seeds)
