"""Mathematics and settings that FlowGRPO and DanceGRPO share: the clipped ratio on recorded steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Self, TypeVar

from pydantic import Field, model_validator
from solrl_proto.rollouts import Eta, SdeKind, StochasticSteps, check_eta

from solrl_trainer.algorithms.algorithm import AT_LEVEL, Algorithm, AlgorithmSettings, Loss, Velocities
from solrl_trainer.algorithms.section import Positive
from solrl_trainer.algorithms.training_data import RecordedTrajectory, TrajectoryBatch, Window, WindowOrder

if TYPE_CHECKING:
    import torch


class GrpoSettings(AlgorithmSettings):
    """Settings of both algorithms."""

    sde: SdeKind = "flow"
    """Stochastic steps. flow: FlowGRPO's. dance: DanceGRPO's. cps: coefficients-preserving, without noise in the
    images."""
    eta: Eta = 0.7
    """Level of the sampler's noise; with cps at most 1."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """The ratio of probabilities, of means over latents, is clipped to 1 ± this."""
    adv_clip: Annotated[float, Field(gt=0)] = 5.0
    """Advantages are clipped to ± this."""
    recompute: bool = True
    """Compute the behaviour policy's log-probabilities again, by a pass wherever it differs from the current policy;
    false: as recorded, which rounds otherwise."""
    window: Positive | None = None
    """Number of stochastic, trained steps; all other steps follow the ODE. null: all but the last."""
    window_within: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the steps, from the noisiest, that the window lies in."""
    window_order: WindowOrder = "random"
    """random: the window is drawn for each iteration. progressive: it moves by one step, from the noisiest, and begins
    again."""
    window_every: Positive = 1
    """Iterations at each place of a progressive window."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_eta(self.sde, self.eta)
        return self


SettingsT = TypeVar("SettingsT", bound=GrpoSettings)


class Grpo(Algorithm[SettingsT, TrajectoryBatch]):
    """PPO's ratio on recorded stochastic steps."""

    def __init__(self, settings: SettingsT) -> None:
        super().__init__(settings)
        if settings.recompute:
            self.fixed = ("old",)

    @property
    def trains_on(self) -> RecordedTrajectory:
        """The settings' stochastic steps."""
        settings = self.settings
        window = Window(settings.window, settings.window_within, settings.window_order, settings.window_every)
        return RecordedTrajectory(StochasticSteps(kind=settings.sde, eta=settings.eta), window)

    def loss(self, batch: TrajectoryBatch, velocity: Velocities) -> Loss:
        """The objective over the recorded steps.

        Its figures: `clipped_objective`'s, and `old_kl`, the approximate KL divergence from the behaviour
        policy, ½·mean (Δ log-probability)²; with `recompute`, also `log_prob_gap`.
        """
        settings = self.settings
        before = batch.log_prob_under(velocity.old) if settings.recompute else batch.log_prob
        change = batch.log_prob_under(velocity.current) - before
        diagnostics = {"old_kl": (change.detach() ** 2).mean() / 2}
        diagnostics |= log_prob_gap(batch, before) if settings.recompute else {}
        advantages = batch.advantages.clamp(-settings.adv_clip, settings.adv_clip)
        value, figures = clipped_objective(change, advantages, settings.clip_range)
        return Loss(value, figures | diagnostics)


def kl_divergence(batch: TrajectoryBatch, velocity: torch.Tensor, reference_velocity: torch.Tensor) -> torch.Tensor:
    """KL divergence [B] of the steps' Gaussians under two velocities, with equal variance, as a mean over latents.

    It is (μ − μ')² / (2·s²·(σ − σ′)); see FlowGRPO's equation for D_KL.
    """
    mean, deviation = batch.gaussian_under(velocity)
    other_mean, _ = batch.gaussian_under(reference_velocity)
    return ((mean - other_mean) ** 2 / (2 * deviation**2)).flatten(1).mean(1)


def log_prob_gap(batch: TrajectoryBatch, recomputed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean distance of recorded from `recomputed` log-probabilities [B] of the behaviour policy, by noise level."""
    gap, figures = (recomputed - batch.log_prob).abs(), {}
    for level in batch.levels:
        here = (batch.sigma == level).to(gap.dtype)
        figures[f"gap{AT_LEVEL}{level:.4f}"] = (gap * here).mean()
        figures[f"{AT_LEVEL}{level:.4f}"] = here.mean()
    return figures


def clipped_objective(
    change: torch.Tensor, advantages: torch.Tensor, clip_range: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's objective, −min(ratio·A, clip(ratio)·A), averaged over steps, and its figures.

    `change` is the log-probability under the current policy less that under the behaviour policy [B]. The ratio is
    clipped to 1 ± `clip_range`. The figures are the mean `ratio`, and `clipped`, the share of ratios beyond that range.
    """
    import torch

    # At most the root of what `change` can hold, so that the mean is finite.
    ratio = change.detach().clamp(max=math.log(torch.finfo(change.dtype).max) / 2).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    beyond = ratio != clipped
    left_out = beyond & ((ratio - 1) * advantages >= 0)
    # The exponential of a step that is left out may overflow, and 0 · ∞ in its derivative is not a number.
    trained = change.masked_fill(left_out, 0).exp()
    value = (-advantages * torch.where(left_out, clipped, trained)).mean()
    return value, {"ratio": ratio.mean(), "clipped": beyond.to(ratio.dtype).mean()}
