"""Diffusion-DPO on the best and worst samples of each prompt. Source: arXiv 2311.12908, for velocities.

docs/algorithms.md lists the differences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from solrl_trainer.algorithms.algorithm import Algorithm, AlgorithmSettings, Loss, Velocities
from solrl_trainer.algorithms.training_data import ForwardBatch, ForwardProcess

if TYPE_CHECKING:
    import torch


class DpoSettings(AlgorithmSettings):
    """Settings of Diffusion-DPO."""

    beta: Annotated[float, Field(gt=0)] = 2000.0
    """Pull to the reference: the larger, the smaller the preference that counts as learnt."""


class DiffusionDpo(Algorithm[DpoSettings, ForwardBatch]):
    """Diffusion-DPO, on the pairs of `best_with_worst`, which share a timestep and noise.

    The reference is the base model.
    """

    Settings = DpoSettings
    trains_on = ForwardProcess()
    fixed = ("reference",)

    def units(self, advantages: torch.Tensor, kept: int) -> torch.Tensor:
        """Pairs of `best_with_worst`."""
        return best_with_worst(advantages, kept)

    def loss(self, batch: ForwardBatch, velocity: Velocities) -> Loss:
        """−log σ(margin), with margin = β/2 · (g⁺ − g⁻), where g is what the policy gains over the reference.

        The gain is the reference's mean squared error of the velocity minus the current policy's. A pair with equal
        advantages has no better sample and no loss. The value is the mean over the pairs, with the figures `accuracy`
        (share of pairs whose better sample gains more), `margin`, `tied` (share of pairs without a better sample,
        which count 0 in the first two), and the mean squared errors `error` and `reference_error`.
        """
        import torch.nn.functional as functional

        true = batch.noise.double() - batch.x0.double()
        error, reference_error = (
            (v.double() - true).square().flatten(1).mean(1) for v in (velocity.current, velocity.reference)
        )
        gain = (reference_error - error).view(-1, 2)
        margin = self.settings.beta / 2 * (gain[:, 0] - gain[:, 1])
        better, worse = batch.advantages.view(-1, 2).unbind(1)
        ranked = better > worse
        value = -(functional.logsigmoid(margin) * ranked).mean()
        margin = margin.detach()
        figures = {
            "accuracy": ((margin > 0) & ranked).double().mean(),
            "margin": (margin * ranked).mean(),
            "tied": (~ranked).double().mean(),
            "error": error.detach().mean(),
            "reference_error": reference_error.mean(),
        }
        return Loss(value, figures)


def best_with_worst(advantages: torch.Tensor, kept: int) -> torch.Tensor:
    """The k-th best sample of each prompt with its k-th worst: indices (better, worse) [prompts · ⌊kept / 2⌋, 2].

    The advantages are [prompts · kept], prompt after prompt. The earlier one of equal samples is the better. The middle
    one of an odd number is left out.
    """
    import torch

    order = advantages.view(-1, kept).argsort(dim=1, descending=True, stable=True)
    order = order + kept * torch.arange(len(order), device=order.device)[:, None]
    half = kept // 2
    return torch.stack([order[:, :half], order.flip(1)[:, :half]], dim=-1).flatten(0, 1)
