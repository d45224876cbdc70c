"""Mathematics and settings that FlowGRPO and DanceGRPO share: the clipped ratio on recorded steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from solrl_trainer.algorithms.base import AlgorithmSettings, FixedPolicy, Velocities
from solrl_trainer.algorithms.training_data import TrajectoryBatch
from solrl_trainer.algorithms.windows import Window, WindowOrder
from solrl_trainer.section import Positive

if TYPE_CHECKING:
    import torch


class GrpoSettings(AlgorithmSettings):
    """Settings of both algorithms."""

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

    @property
    def stochastic(self) -> Window:
        """The stochastic steps."""
        return Window(self.window, self.window_within, self.window_order, self.window_every)

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
        divergence from the behaviour policy, ½·mean (Δ log-probability)².
    """
    before = batch.log_prob_under(velocity.old) if settings.recompute else batch.log_prob
    change = batch.log_prob_under(velocity.current) - before
    value = clipped_objective(change, batch.advantages, settings.clip_range, settings.adv_clip)
    change = change.detach()
    off = (change.exp() - 1).abs() > settings.clip_range
    figures = {"ratio": change.exp().mean(), "clipped": off.float().mean(), "old_kl": (change**2).mean() / 2}
    return value, figures


def clipped_objective(
    change: torch.Tensor, advantages: torch.Tensor, clip_range: float, adv_clip: float
) -> torch.Tensor:
    """−min(ratio·A, clip(ratio)·A), averaged.

    Args:
        change: log-probability under the current policy less that under the behaviour policy [B].
        advantages: [B], clipped to ± `adv_clip` here.
        clip_range: the ratio is clipped to 1 ± this.
        adv_clip: clip range of the advantages.
    """
    import torch

    ratio = change.exp()
    advantages = advantages.clamp(-adv_clip, adv_clip)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped).mean()
