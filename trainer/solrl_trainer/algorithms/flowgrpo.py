"""FlowGRPO and FlowGRPO-Fast. Sources: Liu et al., arXiv 2505.05470, and its code, yifan123/flow_grpo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from solrl_trainer.algorithms.algorithm import Loss, Velocities
from solrl_trainer.algorithms.grpo import Grpo, GrpoSettings, kl_divergence
from solrl_trainer.algorithms.training_data import TrajectoryBatch

if TYPE_CHECKING:
    import torch


class FlowGrpoSettings(GrpoSettings):
    """Settings of FlowGRPO; a window makes it FlowGRPO-Fast, and a progressive one MixGRPO (arXiv 2507.21802)."""

    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the stochastic steps that each sample is trained at."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the KL divergence from the reference: in the paper 0.01 for preferences, 0.04 for rules."""


class FlowGrpo(Grpo[FlowGrpoSettings]):
    """Clipped ratios on stochastic steps, and the KL divergence from the reference."""

    Settings = FlowGrpoSettings

    def __init__(self, settings: FlowGrpoSettings) -> None:
        super().__init__(settings)
        if settings.kl_weight:
            self.fixed += ("reference",)

    def loss(self, batch: TrajectoryBatch, velocity: Velocities) -> Loss:
        """Policy loss, and the weighted KL divergence; figure `kl` is the divergence itself, per latent."""
        policy = super().loss(batch, velocity)
        if not self.settings.kl_weight:
            return policy
        kl = kl_divergence(batch, velocity.current, velocity.reference)
        value = policy.value + self.settings.kl_weight * self.released_kl(batch, kl).mean()
        return Loss(value, {**policy.figures, "kl": kl.detach().mean()})

    def released_kl(self, batch: TrajectoryBatch, kl: torch.Tensor) -> torch.Tensor:
        """The divergence as FlowGRPO's code weighs it [B]: without the factor 1 / (σ − σ′). Its weights fit this form.

        The variance of coefficients-preserving steps has no such factor.
        """
        if self.settings.sde == "cps":
            return kl
        return kl * (batch.sigma - batch.sigma_next).to(kl.device, kl.dtype)
