"""Mathematics and settings that FlowGRPO and DanceGRPO share: the ratio on recorded steps, and its trust regions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeVar

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
    trust_region: Literal["clip", "guard", "dppo"] = "clip"
    """What keeps an update near the behaviour policy. clip: the clipped ratio. guard: GRPO-Guard's. dppo: Flow-DPPO; a
    step beyond kl_threshold that would go further has no gradient."""
    kl_threshold: Annotated[float, Field(gt=0)] = 1e-5
    """With trust_region=dppo, the largest KL divergence of a step, as a mean over latents."""
    adv_clip: Annotated[float, Field(gt=0)] = 5.0
    """Advantages are clipped to ± this."""
    recompute: bool = True
    """Compute the behaviour policy's log-probabilities again at every update, for one more pass; false: as recorded,
    which rounds otherwise."""
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
        if self.trust_region != "clip" and not self.recompute:
            raise ValueError(
                f"trust_region is {self.trust_region}, which compares the policies' means, but recompute is false; "
                "expected recompute=true, or trust_region=clip"
            )
        if self.trust_region == "guard" and self.sde == "cps":
            raise ValueError(
                "trust_region is guard, which needs log-probabilities divided by the variance, unlike sde=cps; "
                "expected sde=flow or dance, or trust_region=dppo"
            )
        return self


SettingsT = TypeVar("SettingsT", bound=GrpoSettings)


class Grpo(Algorithm[SettingsT, TrajectoryBatch]):
    """PPO's ratio on recorded stochastic steps, in the settings' trust region."""

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

        Its figures: the mean ratio, the share of steps beyond the trust region, and `old_kl`, the approximate KL
        divergence from the behaviour policy, ½·mean (Δ log-probability)²; with `recompute`, also `log_prob_gap`; with
        Flow-DPPO, `old_divergence`, the exact divergence.

        GRPO-Guard's is PPO's with a normalised ratio, each step divided by its length σ − σ′. Under the behaviour
        policy, the change of log-probability has the mean −D, with the divergence D of the two, and a spread that is
        large where the step's standard deviation s is small. So the ratio there is exp(s·(change + D)). Source: Wang et
        al., arXiv 2510.22319, as in verl-project/verl-omni.
        """
        settings = self.settings
        before = batch.log_prob_under(velocity.old) if settings.recompute else batch.log_prob
        change = batch.log_prob_under(velocity.current) - before
        others = {"old_kl": (change.detach() ** 2).mean() / 2}
        others |= log_prob_gap(batch, before) if settings.recompute else {}
        advantages = batch.advantages.clamp(-settings.adv_clip, settings.adv_clip)
        if settings.trust_region == "clip":
            value, figures = clipped_objective(change, advantages, settings.clip_range)
        elif settings.trust_region == "guard":
            _, deviation = batch.gaussian_under(velocity.old)
            normalised = (change + kl_divergence(batch, velocity.current, velocity.old)) * deviation.flatten()
            lengths = (batch.sigma - batch.sigma_next).to(change.device, change.dtype)
            value, figures = clipped_objective(normalised, advantages, settings.clip_range, 1 / lengths)
        else:
            kl = kl_divergence(batch, velocity.current.detach(), velocity.old)
            value, figures = masked_objective(change, advantages, kl, settings.kl_threshold)
        return Loss(value, figures | others)


def kl_divergence(batch: TrajectoryBatch, velocity: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL divergence [B] of the steps' Gaussians under two velocities, with equal variance, as a mean over latents.

    It is (μ − μ')² / (2·s²·(σ − σ′)); see FlowGRPO's equation for D_KL.
    """
    mean, deviation = batch.gaussian_under(velocity)
    other_mean, _ = batch.gaussian_under(other)
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
    change: torch.Tensor, advantages: torch.Tensor, clip_range: float, weights: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's objective, −min(ratio·A, clip(ratio)·A), averaged over steps with these weights, and its figures.

    `change` is the log-probability under the current policy less that under the behaviour policy [B]. The ratio is
    clipped to 1 ± `clip_range`. The figures are the mean `ratio`, and `clipped`, the share of ratios beyond that range.
    """
    import torch

    ratio = _figure(change)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    beyond = ratio != clipped
    left_out = beyond & ((ratio - 1) * advantages >= 0)
    value = (-advantages * torch.where(left_out, clipped, _ratio(change, left_out)) * weights).mean()
    return value, {"ratio": ratio.mean(), "clipped": beyond.to(ratio.dtype).mean()}


def masked_objective(
    change: torch.Tensor, advantages: torch.Tensor, kl: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Flow-DPPO's objective, −ratio·A averaged, without the steps that have gone too far and would go further.

    `change` is as of `clipped_objective`. From the divergence `threshold` on, a step must not go further; `kl` [B] is
    that of the two policies' steps, without gradient. The figures are the mean `ratio`, `clipped`, the share of steps
    left out, and `old_divergence`, the mean divergence.

    Source: Ping et al., arXiv 2606.11025, and its code, Tencent-Hunyuan/UniRL.
    """
    import torch

    ratio = _figure(change)
    left_out = (kl >= threshold) & ((ratio - 1) * advantages > 0)
    value = torch.where(left_out, 0, -advantages * _ratio(change, left_out | (advantages == 0))).mean()
    return value, {"ratio": ratio.mean(), "clipped": left_out.to(ratio.dtype).mean(), "old_divergence": kl.mean()}


def _ratio(change: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
    """Ratios [B] with a gradient; 1 without one where a step is left out, whose exponential may overflow.

    A mask behind the exponential is too late: 0 · ∞ in its derivative is not a number.
    """
    return change.masked_fill(left_out, 0).exp()


def _figure(change: torch.Tensor) -> torch.Tensor:
    """Ratios [B] without a gradient, at most the root of what `change` can hold, so that their mean is finite."""
    import torch

    return change.detach().clamp(max=math.log(torch.finfo(change.dtype).max) / 2).exp()
