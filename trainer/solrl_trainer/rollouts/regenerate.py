"""Full-length samples of given seeds, as an algorithm trains on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from solrl_core.generator import Generator
from solrl_core.solvers import SolverSpec

from solrl_trainer.rollouts.groups import GroupSamples, GroupSelection


@dataclass(frozen=True)
class Sampler:
    """Samples from a generator.

    Attributes:
        generator: with a policy merged.
        steps: of the solver.
        solver: the run's, or that of the algorithm's training data.
        guidance: 1.0 is none.
        record: whether to record every step.
    """

    generator: Generator
    steps: int
    solver: SolverSpec
    guidance: float
    record: bool = False

    def sample(self, text: str, seeds: Sequence[int]) -> GroupSamples:
        """Samples of a prompt, one per seed."""
        made = self.generator.generate(
            text, seeds, steps=self.steps, solver=self.solver, guidance=self.guidance, record=self.record
        )
        return GroupSamples(made.latents, made.images, made.recording)


@dataclass(frozen=True)
class Regenerator:
    """Makes the samples that are trained on from the seeds of a selection, in BF16 under the behaviour policy."""

    sampler: Sampler

    def regenerate(self, selection: GroupSelection) -> GroupSamples:
        """Samples of the selected seeds. Candidates that are trained on as they are stay as they are."""
        if selection.samples is not None:
            return selection.samples
        return self.sampler.sample(selection.prompt.text, selection.seeds)
