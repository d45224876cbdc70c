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

Weighting = Literal["uniform", "t", "t_squared", "huber", "ghuber"]
KlWeighting = Literal["uniform", "elbo"]
_ERROR_FLOOR = 1e-10
_SDE_ETA, _SDE_LAST = 0.7, 0.99


class AwmSettings(AlgorithmSettings):
    """Settings of advantage weighted matching."""

    weighting: Weighting = "ghuber"
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
    kl_weighting: KlWeighting = "uniform"
    """Weight of both distances at noise level t. uniform: 1. elbo: 1 / (2·s²) with s² = 0.49·t / (1 − t), the
    variance of FlowGRPO's solver."""
    noise_range: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the sampler's noise levels, from the highest, at which samples are trained; timestep_fraction is a share
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
    """Advantage weighted matching, with `awm_loss` on single samples.

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
        """Loss of a micro-batch, with the figures of `awm_loss`."""
        own = self.settings
        return awm_loss(
            velocity.current,
            velocity.old,
            velocity.reference if own.kl_weight else None,
            batch.x0,
            batch.noise,
            batch.t,
            batch.advantages,
            weighting=own.weighting,
            power=own.power,
            ratio_clip=own.ratio_clip,
            kl_weight=own.kl_weight,
            old_kl_weight=own.old_kl_weight,
            kl_weighting=own.kl_weighting,
        )


def awm_loss(
    v: torch.Tensor,
    v_old: torch.Tensor,
    v_ref: torch.Tensor | None,
    x0: torch.Tensor,
    noise: torch.Tensor,
    t: torch.Tensor,
    advantages: torch.Tensor,
    *,
    weighting: Weighting,
    power: float,
    ratio_clip: float,
    kl_weight: float,
    old_kl_weight: float,
    kl_weighting: KlWeighting,
) -> Loss:
    """PPO's clipped objective on the matching log-probability, plus penalties on the distances to two policies.

    Computed in float64, as in the authors' code: the ratio is the exponential of a small difference.

    Args:
        v: [B, ...] velocity of the current policy at x_t = (1 − t)·x0 + t·noise, with gradient.
        v_old: [B, ...] velocity of the behaviour policy there.
        v_ref: [B, ...] velocity of the base model there; None without that penalty.
        x0: [B, ...] clean latents of the samples.
        noise: [B, ...] the noise mixed in.
        t: [B] in (0, 1].
        advantages: [B], clipped and scaled.
        weighting, power: form of the log-probability, see `matching_log_prob`.
        ratio_clip: ratios are clipped to 1 ± this.
        kl_weight, old_kl_weight: weights of mean (v − v_ref)² and mean (v − v_old)².
        kl_weighting: weight of both at a noise level.

    Returns:
        The loss, with the figures `ratio`, `clipped` (share of ratios beyond the clip), `error` (mean squared error of
        the velocity), `old_distance` and, with the reference, `kl` (mean weighted squared distances).
    """
    v, v_old, t, advantages = v.double(), v_old.double(), t.double(), advantages.double()
    true = noise.double() - x0.double()
    error = _mean_square(v - true)
    old_log_prob = matching_log_prob(_mean_square(v_old - true), t, weighting, power)
    change = matching_log_prob(error, t, weighting, power) - old_log_prob
    value, ratios = clipped_objective(change, advantages, ratio_clip)
    at = 1 if kl_weighting == "uniform" else (1 - t.clamp(max=_SDE_LAST)) / (2 * _SDE_ETA**2 * t)
    old_distance = (at * _mean_square(v - v_old)).mean()
    value = value + old_kl_weight * old_distance
    figures = {
        **ratios,
        "error": error.detach().mean(),
        "old_distance": old_distance.detach(),
    }
    if v_ref is not None:
        kl = (at * _mean_square(v - v_ref.double())).mean()
        value = value + kl_weight * kl
        figures["kl"] = kl.detach()
    return Loss(value, figures)


def matching_log_prob(error: torch.Tensor, t: torch.Tensor, weighting: Weighting, power: float) -> torch.Tensor:
    """Log-probability of samples, up to a constant, from the error of a policy's velocity.

    Args:
        error: mean squared error of the velocity [B].
        t: noise levels [B].
        weighting: form, see `AwmSettings.weighting`. The roots are shifted by 1e-10, so that they have a derivative
            at 0.
        power: exponent of ghuber.

    Returns:
        [B], at most 0.
    """
    match weighting:
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
