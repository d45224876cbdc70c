"""DiffusionNFT's objective on the forward process. Source: arXiv 2509.16117."""

import torch

from solrl_trainer.config import DiffusionNftSettings
from solrl_trainer.objectives.base import Batch, Loss, Objective

_WEIGHT_FLOOR = 1e-5


def group_advantages(rewards: torch.Tensor, *, global_std: bool = True) -> torch.Tensor:
    """Advantages of kept samples.

    Args:
        rewards: [groups, kept] rewards of the regenerated images.
        global_std: divide by the deviation over all rewards of the iteration, else by each group's own.

    Returns:
        [groups, kept], (r − group mean) / (std + 1e-4).
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    std = rewards.std(unbiased=False) if global_std else rewards.std(1, keepdim=True, unbiased=False)
    return centred / (std + 1e-4)


def nft_loss(
    v: torch.Tensor,
    v_old: torch.Tensor,
    v_ref: torch.Tensor,
    x0: torch.Tensor,
    noise: torch.Tensor,
    t: torch.Tensor,
    advantages: torch.Tensor,
    *,
    beta: float,
    adv_clip: float,
    kl_weight: float,
) -> torch.Tensor:
    """Positive- and negative-policy regression weighted by optimality, plus a pull to the reference.

    Args:
        v: [B, ...] velocity of the current policy at x_t = (1 − t)·x0 + t·noise, with gradient.
        v_old: [B, ...] velocity of the behaviour policy there.
        v_ref: [B, ...] velocity of the base model there.
        x0: [B, ...] clean latents of the regenerated samples.
        noise: [B, ...] the noise mixed in.
        t: [B] in (0, 1].
        advantages: [B].
        beta: how far the implicit policies lean away from the old one.
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
        with torch.no_grad():
            off = (predicted.double() - x0.double()).abs().mean(axes, keepdim=True)
            weight = off.clamp(min=_WEIGHT_FLOOR).to(x0.dtype)
        return ((predicted - x0) ** 2 / weight).mean(axes)

    positive = regression(beta * v + (1 - beta) * v_old)
    negative = regression((1 + beta) * v_old - beta * v)
    policy = (optimality * positive / beta + (1 - optimality) * negative / beta).mean() * adv_clip
    return policy + kl_weight * ((v - v_ref) ** 2).mean()


class DiffusionNft(Objective[DiffusionNftSettings]):
    """`nft_loss` on each sample alone."""

    Settings = DiffusionNftSettings
    fixed = ("reference", "old")

    def loss(self, batch: Batch) -> Loss:
        """Needs both fixed velocities."""
        value = nft_loss(
            batch.v,
            batch.v_old,
            batch.v_ref,
            batch.x0,
            batch.noise,
            batch.t,
            batch.advantages,
            beta=self.settings.beta,
            adv_clip=self.settings.adv_clip,
            kl_weight=self.settings.kl_weight,
        )
        return Loss(value, {})
