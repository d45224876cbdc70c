"""Mathematics and settings that FlowGRPO and DanceGRPO share: the clipped ratio on recorded steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator
from solrl_proto.rollouts import Eta, SdeKind, StochasticSteps, check_eta

from solrl_trainer.algorithms.algorithm import AT, AlgorithmSettings, FixedPolicy, Velocities
from solrl_trainer.algorithms.training_data import RecordedTrajectory, TrajectoryBatch
from solrl_trainer.algorithms.windows import Window, WindowOrder
from solrl_trainer.settings.section import Positive

if TYPE_CHECKING:
    import torch


class GrpoSettings(AlgorithmSettings):
    """Settings of both algorithms."""

    sde: SdeKind = "flow"
    """Stochastic steps. flow: FlowGRPO's. dance: DanceGRPO's. cps: coefficients-preserving sampling, which leaves
    no noise in the images that rewards judge."""
    eta: Eta = 0.7
    """Level of the sampler's noise. That of cps is at most 1."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """The ratio of probabilities is clipped to 1 ± this. It is small because log-probabilities are means over
    latents, not sums."""
    adv_clip: Annotated[float, Field(gt=0)] = 5.0
    """Advantages are clipped to ± this."""
    recompute: bool = True
    """Compute the steps' log-probabilities under the behaviour policy again at every update, with the arithmetic of
    training, for one more pass without gradient; false: as recorded, by a generator, which rounds otherwise."""
    window: Positive | None = None
    """Number of stochastic, trained steps; the others follow the ODE. null: all but the last."""
    window_within: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the steps, from the noisiest, in which the window lies."""
    window_order: WindowOrder = "random"
    """random: the window's place is drawn for each iteration. progressive: it moves by one step, from the noisiest, and
    begins again."""
    window_every: Positive = 1
    """Iterations at each place of a progressive window."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_eta(self.sde, self.eta)
        return self

    @property
    def trajectory(self) -> RecordedTrajectory:
        """Training data: the stochastic steps."""
        window = Window(self.window, self.window_within, self.window_order, self.window_every)
        return RecordedTrajectory(StochasticSteps(kind=self.sde, eta=self.eta), window)

    @property
    def behaviour(self) -> tuple[FixedPolicy, ...]:
        """The behaviour policy, if its velocities are needed."""
        return ("old",) if self.recompute else ()


def clipped_policy_loss(
    batch: TrajectoryBatch, velocity: Velocities, settings: GrpoSettings
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped objective over the recorded steps.

    Args:
        batch: recorded steps.
        velocity: velocities of the current policy, and with `recompute` of the behaviour policy.
        settings: clip ranges.

    Returns:
        Scalar loss, and figures: the mean ratio, the share of ratios beyond the clip range, and the approximate KL
        divergence from the behaviour policy, ½·mean (Δ log-probability)²; with `recompute`, also `log_prob_gap`.
    """
    before = batch.log_prob_under(velocity.old) if settings.recompute else batch.log_prob
    gap = log_prob_gap(batch, before) if settings.recompute else {}
    change = batch.log_prob_under(velocity.current) - before
    advantages = batch.advantages.clamp(-settings.adv_clip, settings.adv_clip)
    value, figures = clipped_objective(change, advantages, settings.clip_range)
    return value, figures | {"old_kl": (change.detach() ** 2).mean() / 2} | gap


def log_prob_gap(batch: TrajectoryBatch, recomputed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean distance of the behaviour policy's log-probabilities in rollout and in training, as figures by noise level.

    Args:
        batch: recorded steps.
        recomputed: their log-probabilities under the behaviour policy in the arithmetic of training [B].
    """
    gap, figures = (recomputed - batch.log_prob).abs(), {}
    for level in batch.levels:
        here = (batch.sigma == level).to(gap.dtype)
        figures[f"gap{AT}{level:.4f}"] = (gap * here).mean()
        figures[f"{AT}{level:.4f}"] = here.mean()
    return figures


def clipped_objective(
    change: torch.Tensor, advantages: torch.Tensor, clip_range: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's objective, −min(ratio·A, clip(ratio)·A), averaged.

    Args:
        change: log-probability under the current policy less that under the behaviour policy [B].
        advantages: [B], clipped.
        clip_range: the ratio is clipped to 1 ± this.

    Returns:
        Scalar, and figures: the mean `ratio`, and `clipped`, the share of ratios beyond the clip range.
    """
    import torch

    ratio = change.exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    value = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
    ratio = ratio.detach()
    beyond = (ratio - 1).abs() > clip_range
    return value, {"ratio": ratio.mean(), "clipped": beyond.to(ratio.dtype).mean()}
