"""Regeneration: the samples that an algorithm trains on, from selected seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from solrl_engine.sampler import Sampler
from solrl_engine.side_stream import Pending

from solrl_trainer.rollouts.groups import GroupSelection, ScoredSamples, flattened
from solrl_trainer.rollouts.scoring import SampleScorer


class Regenerator(Protocol):
    """Regenerates and scores selected candidates under the behaviour policy, in BF16 and with all steps."""

    def groups_per_batch(self, kept: int) -> int:
        """Number of selections of `kept` seeds to regenerate together."""

    def regenerate(self, selections: Sequence[GroupSelection], iteration: int) -> Pending[ScoredSamples]:
        """Samples of the seeds of an iteration's selections, which are being scored, or made by a service."""


@dataclass(frozen=True)
class LocalRegenerator:
    """Regenerates on this device."""

    sampler: Sampler
    scorer: SampleScorer

    def groups_per_batch(self, kept: int) -> int:
        """Number of selections that fill a batch."""
        return self.sampler.batch.groups(kept, self.sampler.generator.backbone.device)

    def regenerate(self, selections: Sequence[GroupSelection], iteration: int) -> Pending[ScoredSamples]:
        """Samples of the selected seeds; samples that were generated locally for training are returned unchanged."""
        made = [selection.samples for selection in selections if selection.samples is not None]
        if made:
            samples = ScoredSamples.join(made)
            return lambda: samples
        prompts, seeds = flattened([one.prompt for one in selections], [one.seeds for one in selections])
        return self.scorer.score(prompts, self.sampler.sample(prompts, seeds))
