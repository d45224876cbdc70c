"""Solvers of the flow-matching ODE, and the interface of all solvers. They know velocities and noise levels alone.

A solver object belongs to one trajectory, because some solvers need the predictions of earlier steps, a row for each
candidate. Noise levels σ run from 1 (noise) to 0 (clean): x = (1 − σ)·x0 + σ·ε, and dx/dσ = v.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

import torch
from solrl_proto.rollouts import FittedSolver
from torch import Tensor

from solrl_core.devices import upload


class Solver(ABC):
    """Steps of one trajectory.

    Attributes:
        history: what later steps need of earlier ones, float32 [B, ...] each; the last is `clean`.
        sigma: noise level at the start of the last step; None before any step.
    """

    def __init__(self) -> None:
        self.history: tuple[Tensor, ...] = ()
        self.sigma: float | None = None

    @abstractmethod
    def step(
        self, x: Tensor, sigma: float, sigma_next: float, velocity: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Go from one noise level to the next.

        Args:
            x: latents [B, ...] at `sigma`.
            sigma, sigma_next: noise levels, the next one smaller.
            velocity: the model's dx/dσ at x, [B, ...].
            noise: standard normal [B, ...], for a stochastic solver alone.

        Returns:
            The latents at `sigma_next`, and their log-probability [B]; None for an ODE.
        """

    @property
    def clean(self) -> Tensor | None:
        """Clean latents as predicted after the last step; at σ = 0 the latents themselves. None before any step."""
        return self.history[-1] if self.history else None

    def schedule(self, steps: int, of_model: Callable[[int], list[float]]) -> list[float]:
        """The `steps + 1` noise levels from 1 to 0: the model's, unless the solver has its own."""
        return of_model(steps)

    def noisy(self, index: int, sigma_next: float) -> bool:
        """Whether the step with this index, to `sigma_next`, needs noise."""
        return False

    def copy(self) -> Self:
        """An independent solver that continues from the same point."""
        return copy.copy(self)

    def rows(self, which: slice | Sequence[int]) -> Self:
        return self._mapped(lambda tensor: tensor[which])

    def to(self, device: torch.device) -> Self:
        return self._mapped(lambda tensor: upload(tensor, device))

    def join(self, others: Sequence[Self]) -> Self:
        """One solver for the candidates of this solver and of `others`, which must have taken the same steps."""
        joined = self.copy()
        joined.history = tuple(map(torch.cat, zip(self.history, *(solver.history for solver in others), strict=True)))
        return joined

    def _straight(self, x: Tensor, sigma: float, sigma_next: float, velocity: Tensor) -> Tensor:
        self.history, self.sigma = (x - sigma * velocity,), sigma
        return x + (sigma_next - sigma) * velocity

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        mapped = self.copy()
        mapped.history = tuple(map(change, self.history))
        return mapped


class Euler(Solver):
    """Euler's method on dx/dσ."""

    def step(
        self, x: Tensor, sigma: float, sigma_next: float, velocity: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """x' = x + (σ' − σ)·v."""
        return self._straight(x, sigma, sigma_next, velocity), None


class Dpm2(Solver):
    """DPM-Solver++(2M), which extrapolates the predictions of clean latents over λ = log((1 − σ)/σ).

    The exact solution for a constant prediction x̂0 is x' = (σ'/σ)·x + (1 − σ'/σ)·x̂0. The second order replaces x̂0 by
    its extrapolation to the middle of the step in λ, from this prediction and the previous one. The first step has no
    previous prediction, and at σ' = 0 λ is infinite: both are Euler's. A step after σ = 1 gains nothing either, because
    the previous prediction is infinitely far away in λ.

    Source: Lu et al., arXiv 2211.01095, algorithm 2.
    """

    def step(
        self, x: Tensor, sigma: float, sigma_next: float, velocity: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """x' = (σ'/σ)·x + (1 − σ'/σ)·(extrapolated x̂0)."""
        clean = towards = x - sigma * velocity
        if self.sigma is not None and sigma_next > 0:
            here = log_snr(sigma)
            weight = (log_snr(sigma_next) - here) / (2 * (here - log_snr(self.sigma)))
            towards = clean + weight * (clean - self.history[-1])
        self.history, self.sigma = (clean,), sigma
        return sigma_next / sigma * x + (1 - sigma_next / sigma) * towards, None


class Fitted(Solver):
    """Steps whose weights were fitted to a model; see `FittedSolver` and `solrl_core.sampling.fitting`."""

    def __init__(self, weights: FittedSolver) -> None:
        super().__init__()
        self._weights = weights

    @property
    def predictions(self) -> tuple[Tensor, ...]:
        """Clean latents as the model predicted them in each step so far."""
        return self.history[:-1]

    def schedule(self, steps: int, of_model: Callable[[int], list[float]]) -> list[float]:
        return [*self._weights.sigmas, 0.0]

    def step(
        self, x: Tensor, sigma: float, sigma_next: float, velocity: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Weigh the latents and all predictions so far."""
        index = len(self.predictions)
        predictions = (*self.predictions, x - sigma * velocity)
        parts = (x, *predictions)
        clean = weigh(self._weights.x0_coeffs[index], parts)
        steps = self._weights.step_coeffs
        self.history, self.sigma = (*predictions, clean), sigma
        return weigh(steps[index], parts) if index < len(steps) else clean, None


def weigh(weights: Sequence[float], parts: Sequence[Tensor]) -> Tensor:
    """The weighted sum of equally shaped tensors."""
    total = weights[0] * parts[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = total.add(part, alpha=weight)
    return total


def log_snr(sigma: float) -> float:
    """λ = log((1 − σ)/σ) for σ in (0, 1], half the logarithm of the signal-to-noise ratio; −∞ for 1."""
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf
