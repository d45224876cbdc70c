"""Advantage weighted matching on the forward process. Source: arXiv 2509.25050, and its authors' code.

docs/algorithms.md lists the differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from solrl_trainer.algorithms.algorithm import Algorithm, AlgorithmSettings, Loss, Velocities
from solrl_trainer.algorithms.grpo import clipped_objective
from solrl_trainer.algorithms.training_data import ForwardBatch, ForwardProcess, TrainingData, TrainingSamples

if TYPE_CHECKING:
    import torch

_ERROR_FLOOR = 1e-10
_SDE_ETA, _SDE_LAST = 0.7, 0.99


class AwmSettings(AlgorithmSettings):
    """Settings of advantage weighted matching."""

    weighting: Literal["uniform", "t", "t_squared", "huber", "ghuber"] = "ghuber"
    """Log-probability of a sample at noise level t, from the mean squared error e of the velocity. uniform: −e.
    t: −t·e. t_squared: −t²·e. huber: −t·√e. ghuber: −t·e^power / power."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Exponent with weighting=ghuber."""
    ratio_clip: Annotated[float, Field(gt=0)] = 1.0
    """Ratios of probabilities are clipped to 1 ± this, as in PPO."""
    adv_clip: Annotated[float, Field(gt=0)] = 5.0
    """Advantages are clipped to ± this."""
    adv_max: Annotated[float, Field(gt=0)] = 1.0
    """Clipped advantages are scaled to at most ± this."""
    kl_weight: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the squared distance to the reference's velocity."""
    old_kl_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the squared distance to the behaviour policy's velocity."""
    kl_weighting: Literal["uniform", "elbo"] = "uniform"
    """Weight of both distances at noise level t. uniform: 1. elbo: 1 / (2·s²) with s² = 0.49·t / (1 − t), the
    variance of FlowGRPO's solver."""
    noise_range: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the sampler's noise levels, from the highest, to train samples at; timestep_fraction is a share
    of these."""
    initial_noise: bool = True
    """Train at the highest noise level, too."""


class HighNoise(ForwardProcess):
    """The forward process at the higher noise levels of the sampler."""

    def __init__(self, share: float, *, initial: bool) -> None:
        """`share`: share of the noise levels, rounded down, at least one. `initial`: include the highest."""
        self._share = share
        self._initial = initial

    def sigmas(self, samples: TrainingSamples, schedule: Sequence[float]) -> Sequence[float]:
        """The schedule without its lowest noise levels.

        Raises:
            ValueError: no noise level is left.
        """
        first, last = int(not self._initial), max(1, int(self._share * (len(schedule) - 1)))
        if first >= last:
            raise ValueError(
                f"algorithm.noise_range={self._share:g} selects one of {len(schedule) - 1} noise levels, and "
                "algorithm.initial_noise=false excludes it; expected more regenerate.steps, or initial_noise=true"
            )
        return schedule[first : last + 1]


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
        """The forward process at the noise levels of `noise_range`."""
        return HighNoise(self.settings.noise_range, initial=self.settings.initial_noise)

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages relative to the group, clipped to ± adv_clip and scaled to ± adv_max."""
        limit = self.settings.adv_clip
        return super().advantages(rewards).clamp(-limit, limit) * (self.settings.adv_max / limit)

    def loss(self, batch: ForwardBatch, velocity: Velocities) -> Loss:
        """PPO's clipped objective on the matching log-probability, plus penalties on the distances to two policies.

        Computed in float64, as in the authors' code: the ratio is the exponential of a small difference. The figures
        are `ratio`, `clipped` (share of ratios beyond the clip), `error` (mean squared error of the velocity),
        `old_distance` and, with the reference, `kl` (mean weighted squared distances).
        """
        own, v, v_old, t = self.settings, velocity.current.double(), velocity.old.double(), batch.t.double()
        true = batch.noise.double() - batch.x0.double()
        error = _mean_square(v - true)
        change = self._log_prob(error, t) - self._log_prob(_mean_square(v_old - true), t)
        value, figures = clipped_objective(change, batch.advantages.double(), own.ratio_clip)
        at = 1 if own.kl_weighting == "uniform" else (1 - t.clamp(max=_SDE_LAST)) / (2 * _SDE_ETA**2 * t)
        old_distance = (at * _mean_square(v - v_old)).mean()
        value = value + own.old_kl_weight * old_distance
        figures |= {"error": error.detach().mean(), "old_distance": old_distance.detach()}
        if own.kl_weight:
            kl = (at * _mean_square(v - velocity.reference.double())).mean()
            value = value + own.kl_weight * kl
            figures["kl"] = kl.detach()
        return Loss(value, figures)

    def _log_prob(self, error: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Log-probability of samples [B], up to a constant and at most 0, from the error [B] of a policy's velocity.

        The roots are shifted by 1e-10, so that they have a derivative at 0.
        """
        power = self.settings.power
        match self.settings.weighting:
            case "uniform":
                return -error
            case "t":
                return -error * t
            case "t_squared":
                return -error * t**2
            case "huber":
                return -_shifted_power(error, 0.5) * t
            case "ghuber":
                return -_shifted_power(error, power) * t / power


def _shifted_power(error: torch.Tensor, power: float) -> torch.Tensor:
    return (error + _ERROR_FLOOR) ** power - math.pow(_ERROR_FLOOR, power)


def _mean_square(values: torch.Tensor) -> torch.Tensor:
    return values.square().flatten(1).mean(1)
