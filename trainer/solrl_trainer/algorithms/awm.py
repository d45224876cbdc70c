"""Advantage weighted matching on the forward process. Source: arXiv 2509.25050, and its authors' code.

docs/algorithms.md lists the differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from solrl_trainer.algorithms.algorithm import Algorithm, AlgorithmSettings, Loss, Velocities
from solrl_trainer.algorithms.grpo import clipped_objective
from solrl_trainer.algorithms.training_data import ForwardBatch, ForwardProcess, TrainingData, TrainingSamples

if TYPE_CHECKING:
    import torch

_ERROR_FLOOR = 1e-10
# The authors' values.
POWER = 0.25
"""Exponent of the error in the log-probability."""
RATIO_CLIP = 1.0
"""Ratios of probabilities are clipped to 1 ± this, as in PPO."""
ADV_MAX = 1.0
"""Clipped advantages are scaled to at most ± this."""
OLD_KL_WEIGHT = 1.0
"""Weight of the squared distance to the behaviour policy's velocity."""
NOISE_RANGE = 0.9
"""Trained share of the sampler's noise levels, from the highest."""


class AwmSettings(AlgorithmSettings):
    """Settings of advantage weighted matching."""

    adv_clip: Annotated[float, Field(gt=0)] = 5.0
    """Advantages are clipped to ± this, and then divided by it."""
    kl_weight: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the squared distance to the reference's velocity."""


class HighNoise(ForwardProcess):
    """The forward process at the highest 90 % of the sampler's noise levels, rounded down, at least one."""

    def sigmas(self, samples: TrainingSamples, schedule: Sequence[float]) -> Sequence[float]:
        """The schedule without its lowest noise levels."""
        return schedule[: max(1, int(NOISE_RANGE * (len(schedule) - 1))) + 1]


class Awm(Algorithm[AwmSettings, ForwardBatch]):
    """Advantage weighted matching, on single samples.

    The log-probability of a sample is its negative flow-matching error: a policy gradient with the loss of pretraining.
    """

    Settings = AwmSettings

    def __init__(self, settings: AwmSettings) -> None:
        super().__init__(settings)
        self.fixed = ("reference", "old") if settings.kl_weight else ("old",)

    @property
    def trains_on(self) -> TrainingData[ForwardBatch]:
        """The forward process at the higher noise levels."""
        return HighNoise()

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages relative to the group, clipped to ± adv_clip and scaled to ± `ADV_MAX`."""
        limit = self.settings.adv_clip
        return super().advantages(rewards).clamp(-limit, limit) * (ADV_MAX / limit)

    def loss(self, batch: ForwardBatch, velocity: Velocities) -> Loss:
        """PPO's clipped objective on the matching log-probability, plus penalties on the distances to two policies.

        Computed in float64, as in the authors' code: the ratio is the exponential of a small difference. The figures
        are `ratio`, `clipped` (share of ratios beyond the clip), `error` (mean squared error of the velocity),
        `old_distance` and, with the reference, `kl` (mean weighted squared distances).
        """
        v, v_old, t = velocity.current.double(), velocity.old.double(), batch.t.double()
        true = batch.noise.double() - batch.x0.double()
        error = _mean_square(v - true)
        change = log_prob(error, t) - log_prob(_mean_square(v_old - true), t)
        value, figures = clipped_objective(change, batch.advantages.double(), RATIO_CLIP)
        old_distance = _mean_square(v - v_old).mean()
        value = value + OLD_KL_WEIGHT * old_distance
        figures |= {"error": error.detach().mean(), "old_distance": old_distance.detach()}
        if self.settings.kl_weight:
            kl = _mean_square(v - velocity.reference.double()).mean()
            value = value + self.settings.kl_weight * kl
            figures["kl"] = kl.detach()
        return Loss(value, figures)


def log_prob(error: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Log-probability −4·t·∜e of samples [B], up to a constant and at most 0, from the error e [B] of the velocity.

    The error is shifted by 1e-10, so that its root has a derivative at 0.
    """
    return -((error + _ERROR_FLOOR) ** POWER - math.pow(_ERROR_FLOOR, POWER)) * t / POWER


def _mean_square(values: torch.Tensor) -> torch.Tensor:
    return values.square().flatten(1).mean(1)
