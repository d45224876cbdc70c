"""Section of a run's settings: evaluation."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from solrl_trainer.algorithms.section import Positive, Section, Steps

Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""Several names, or a single one."""


class EvaluateSettings(Section):
    """Settings of evaluation, on held-out prompts with fixed seeds and the averaged weights."""

    prompts: Positive = 128
    """Held-out prompts; of a larger set, a fixed sample, with each value of a tag in proportion."""
    seeds: Positive = 4
    """Images per prompt."""
    steps: Steps = 40
    """Solver steps of an image."""
    every: Annotated[int, Field(ge=0)] = 10
    """Iterations between evaluations, for the held-out curve; 0: only before and after the run."""
    curve_seeds: Positive = 1
    """Images per prompt of the held-out curve, the first of `seeds`."""
    curve_prompts: Positive | None = None
    """Prompts of the held-out curve, the first of `prompts`; null: all."""
    rewards: Names = ()
    """Rewards that are only evaluated."""
    stop_after: Annotated[float, Field(gt=0, le=1)] | None = None
    """A run ends after this share of `iterations` without a new best held-out reward, as does one whose 95 % interval
    lies below its best version's mean. It exports its best checkpoint. null: it goes on, and exports its last."""
    guards: Names = ()
    """Evaluated rewards that end the run, with its best checkpoint, when the 95 % interval of their change from the
    base lies below 0."""
    fidelity_prompts: Annotated[int, Field(ge=0)] = 4
    """Held-out prompts of rank fidelity, over all candidates."""
    fidelity_every: Annotated[int, Field(ge=0)] = 10
    """Iterations between these measurements; 0: only before the run."""
    fidelity_floor: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Least Spearman: below it, the run stops, unless chance or a saturated reward explains that; 0: never."""

    def is_due(self, version: int) -> bool:
        """Whether a version is evaluated along the run."""
        return self.every > 0 and version > 0 and version % self.every == 0
