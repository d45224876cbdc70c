"""DiffusionNFT on the forward process. Source: arXiv 2509.16117."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from solrl_trainer.algorithms.algorithm import Algorithm, AlgorithmSettings, Loss, Velocities
from solrl_trainer.algorithms.training_data import ForwardBatch, ForwardProcess

if TYPE_CHECKING:
    import torch

_WEIGHT_FLOOR = 1e-5


class DiffusionNftSettings(AlgorithmSettings):
    """Settings of DiffusionNFT."""

    beta: Annotated[float, Field(gt=0)] = 1.0
    """Distance of the implicit policies from the behaviour policy. A smaller beta learns faster, and is less stable."""
    beta_end: Annotated[float, Field(gt=0)] | None = None
    """beta from iteration beta_iterations on; before, it moves there from beta by a constant factor. null: beta is
    constant."""
    beta_iterations: Annotated[int, Field(gt=0)] = 20
    """Iterations until beta is beta_end."""
    adv_clip: Annotated[float, Field(gt=0)] = 5.0
    """Advantages are clipped to ± this."""
    kl_weight: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the squared distance to the reference's velocity."""

    def beta_at(self, iteration: int) -> float:
        """beta in an iteration, from 0."""
        if self.beta_end is None:
            return self.beta
        share = min(1.0, iteration / self.beta_iterations)
        return float(self.beta ** (1 - share) * self.beta_end**share)


class DiffusionNft(Algorithm[DiffusionNftSettings, ForwardBatch]):
    """DiffusionNFT, with `nft_loss` on single samples."""

    Settings = DiffusionNftSettings
    trains_on = ForwardProcess()

    def __init__(self, settings: DiffusionNftSettings) -> None:
        super().__init__(settings)
        self.fixed = ("reference", "old") if settings.kl_weight else ("old",)

    def at(self, iteration: int) -> Self:
        """The algorithm with the iteration's beta."""
        return type(self)(self.settings.model_copy(update={"beta": self.settings.beta_at(iteration)}))

    def loss(self, batch: ForwardBatch, velocity: Velocities) -> Loss:
        """Loss of a micro-batch.

        Its figures: `old_distance` and `kl`, the mean squared distance of the current velocity to that of the behaviour
        policy and of the reference (if that is computed); `clipped`, the share of advantages beyond the clip.
        """
        settings = self.settings
        reference = velocity.reference if settings.kl_weight else None
        value = nft_loss(
            velocity.current,
            velocity.old,
            reference,
            batch.x0,
            batch.noise,
            batch.t,
            batch.advantages,
            beta=settings.beta,
            adv_clip=settings.adv_clip,
            kl_weight=settings.kl_weight,
        )
        current = velocity.current.detach()
        figures = {
            "old_distance": ((current - velocity.old) ** 2).mean(),
            "clipped": (batch.advantages.abs() > settings.adv_clip).to(current.dtype).mean(),
        }
        if reference is not None:
            figures["kl"] = ((current - reference) ** 2).mean()
        return Loss(value, figures)


def nft_loss(
    v: torch.Tensor,
    v_old: torch.Tensor,
    v_ref: torch.Tensor | None,
    x0: torch.Tensor,
    noise: torch.Tensor,
    t: torch.Tensor,
    advantages: torch.Tensor,
    *,
    beta: float,
    adv_clip: float,
    kl_weight: float,
) -> torch.Tensor:
    """Positive- and negative-policy regression weighted by optimality, plus a penalty on the distance to the reference.

    Args:
        v: [B, ...] velocity of the current policy at x_t = (1 − t)·x0 + t·noise, with gradient.
        v_old: [B, ...] velocity of the behaviour policy there.
        v_ref: [B, ...] velocity of the base model there; None without the penalty.
        x0: [B, ...] clean latents of the regenerated samples.
        noise: [B, ...] the noise mixed in.
        t: [B] in (0, 1].
        advantages: [B].
        beta: distance of the implicit policies from the old one.
        adv_clip: advantages are clipped to ± this.
        kl_weight: weight of mean (v − v_ref)².

    Returns:
        Scalar loss.
    """
    axes = tuple(range(1, x0.ndim))
    at = t.view(-1, *[1] * (x0.ndim - 1))
    x_t = (1 - at) * x0 + at * noise
    optimality = (advantages.clamp(-adv_clip, adv_clip) / (2 * adv_clip) + 0.5).clamp(0, 1)

    def regression(velocity: torch.Tensor) -> torch.Tensor:
        predicted = x_t - at * velocity
        off = (predicted.detach().double() - x0.double()).abs().mean(axes, keepdim=True)
        weight = off.clamp(min=_WEIGHT_FLOOR).to(x0.dtype)
        return ((predicted - x0) ** 2 / weight).mean(axes)

    positive = regression(beta * v + (1 - beta) * v_old)
    negative = regression((1 + beta) * v_old - beta * v)
    policy = (optimality * positive / beta + (1 - optimality) * negative / beta).mean() * adv_clip
    return policy if v_ref is None else policy + kl_weight * ((v - v_ref) ** 2).mean()
