"""Regeneration: the selected seeds again, in BF16 and at full length, under the behaviour policy."""

from solrl_core.generator import Generator

from solrl_trainer.config import Regenerate
from solrl_trainer.rollouts.groups import GroupSamples, GroupSelection


class Regenerator:
    """Makes the samples that are trained on from the seeds of a selection."""

    def __init__(self, generator: Generator, settings: Regenerate, *, solver: str, guidance: float) -> None:
        """Describe a regenerator.

        Args:
            generator: BF16, with the behaviour policy merged.
            settings: number of steps.
            solver, guidance: of sampling.
        """
        self._generator = generator
        self._settings = settings
        self._solver = solver
        self._guidance = guidance

    def regenerate(self, selection: GroupSelection) -> GroupSamples:
        """Samples of the selected seeds. Candidates that are trained on as they are stay as they are."""
        if selection.samples is not None:
            return selection.samples
        made = self._generator.generate(
            selection.prompt.text,
            selection.seeds,
            steps=self._settings.steps,
            solver=self._solver,
            guidance=self._guidance,
        )
        return GroupSamples(made.latents, made.images)
