"""Regeneration: the samples that an algorithm trains on, from selected seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from solrl_core.generator import Generator
from solrl_core.solvers import SolverSpec

from solrl_trainer.rollouts.batch_limit import BatchLimit
from solrl_trainer.rollouts.groups import GroupSamples, GroupSelection


@dataclass(frozen=True)
class Sampler:
    """Draws samples from a generator.

    Attributes:
        generator: generator with a policy merged.
        steps: solver steps.
        solver: the run's solver, or that of the algorithm's training data.
        guidance: guidance scale; 1.0 disables guidance.
        record: record every step.
        limit: largest number of samples in a batch.
    """

    generator: Generator
    steps: int
    solver: SolverSpec
    guidance: float
    record: bool = False
    limit: BatchLimit = field(default_factory=BatchLimit)

    def sample(self, text: str, seeds: Sequence[int]) -> GroupSamples:
        """Generate samples of a prompt, one per seed."""
        generated = self.limit.run(
            lambda size: self.generator.generate(
                text,
                seeds,
                steps=self.steps,
                solver=self.solver,
                guidance=self.guidance,
                batch_limit=size,
                record=self.record,
            )
        )
        return GroupSamples(generated.latents, generated.images, generated.recording)


@dataclass(frozen=True)
class Regenerator:
    """Regenerates the candidates of a selection under the behaviour policy, in BF16 and with all steps."""

    sampler: Sampler

    def regenerate(self, selection: GroupSelection) -> GroupSamples:
        """Samples of the selected seeds; samples that were generated locally for training are returned unchanged."""
        if selection.samples is not None:
            return selection.samples
        return self.sampler.sample(selection.prompt.text, selection.seeds)
