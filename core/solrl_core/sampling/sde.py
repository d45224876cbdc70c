"""Stochastic solvers, whose steps have log-probabilities that a policy gradient can use.

The flow-matching SDE has the ODE's marginal distributions for any diffusion coefficient s(σ). With dt = σ' − σ < 0 and
the predicted noise ε̂ = x + (1 − σ)·v, whose score is −ε̂/σ, a step draws

    x' = x + v·dt + s²/(2σ)·ε̂·dt + s·√(−dt)·noise.

Solvers of the SDE differ in s. Coefficients-preserving sampling is not one of them: it replaces a part of ε̂ by new
noise. A window restricts the noise to some of the steps.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Self

import torch
from solrl_proto.rollouts import SdeKind
from torch import Tensor

from solrl_core.sampling.solvers import Solver


class StochasticSolver(Solver):
    """Steps with noise. Each step is drawn from a Gaussian.

    Attributes:
        window: (index of the first step with noise, number of such steps), such as (2, 4) for steps 2 to 5, or
            (2, None) for all from step 2; never the step to σ = 0. None: all steps.
    """

    window: tuple[int, int | None] | None = None

    def windowed(self, first: int = 0, size: int | None = None) -> Self:
        """The same with noise in a window of steps, and Euler's steps outside.

        The step to σ = 0 is then always Euler's: its Gaussian would be so narrow that no algorithm trains on it, and
        its noise would stay in the image.

        Source: Li et al., arXiv 2507.21802 (MixGRPO); FlowGRPO-Fast has the same steps.
        """
        solver = self.copy()
        solver.window = (first, size)
        return solver

    def noisy(self, index: int, sigma_next: float) -> bool:
        """Whether the step is in the window."""
        if self.window is None:
            return True
        first, size = self.window
        return sigma_next > 0 and first <= index and (size is None or index < first + size)

    @abstractmethod
    def coefficients(self, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Factors (a, b, c) in x' = a·x + b·velocity + c·noise; float64 of the levels' shape."""

    def log_density(self, value: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        """Log-probability [B] of a step to `value` [B, ...], a mean over all other axes."""
        density = -((value - mean) ** 2) / (2 * deviation**2) - deviation.log() - math.log(2 * math.pi) / 2
        return density.flatten(1).mean(1)

    def gaussian(
        self, x: Tensor, sigma: float | Tensor, sigma_next: float | Tensor, velocity: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean [B, ...] of x', and standard deviation, which broadcasts to it; `log_prob` describes the arguments."""
        # Coefficients are computed in float64, then cast to the type of x.
        now, then = (_column(level, x) for level in (sigma, sigma_next))
        of_x, of_velocity, deviation = self.coefficients(now, then)
        return of_x.to(x.dtype) * x + of_velocity.to(x.dtype) * velocity, deviation.to(x.dtype)

    def step(
        self, x: Tensor, sigma: float, sigma_next: float, velocity: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Draw x' from the step's Gaussian, whose log-probability is `log_prob`'s, bit for bit; Euler's without noise.

        Raises:
            ValueError: there is neither noise nor a window that may exclude the step.
        """
        if noise is None:
            if self.window is None:
                raise ValueError("got no noise for a stochastic step; expected a standard normal tensor like x")
            return self._straight(x, sigma, sigma_next, velocity), None
        mean, deviation = self.gaussian(x, sigma, sigma_next, velocity)
        x_next = mean + deviation * noise
        self.history, self.sigma = (x - sigma * velocity if sigma_next > 0 else x_next,), sigma
        return x_next, self.log_density(x_next, mean, deviation)

    def log_prob(
        self,
        x: Tensor,
        sigma: float | Tensor,
        sigma_next: float | Tensor,
        velocity: Tensor,
        x_next: Tensor,
    ) -> Tensor:
        """Log-probability [B], a mean over all other axes, of a step from x to `x_next` under a policy's velocity.

        Args:
            x, x_next: recorded latents [B, ...].
            sigma, sigma_next: noise levels, one for all or [B]; in float64 the result has the same bits as `step`'s.
            velocity: the policy's dx/dσ at x, [B, ...]; gradients flow through it.
        """
        return self.log_density(x_next, *self.gaussian(x, sigma, sigma_next, velocity))


class ScaledSde(StochasticSolver):
    """A solver of the SDE whose diffusion coefficient is proportional to a level η."""

    def __init__(self, eta: float) -> None:
        super().__init__()
        self._eta = eta

    @abstractmethod
    def squared_diffusion(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """s² of steps between these noise levels, float64 of their shape."""

    def coefficients(self, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dt = sigma_next - sigma
        variance = self.squared_diffusion(sigma, sigma_next)
        of_x = 1 + variance / (2 * sigma) * dt
        of_velocity = (1 + variance * (1 - sigma) / (2 * sigma)) * dt
        return of_x, of_velocity, (variance * -dt).sqrt()


class FlowSde(ScaledSde):
    """FlowGRPO's steps: s = η·√(σ / (1 − σ)), where a first level σ = 1 is replaced in the denominator by the second.

    Source: Liu et al., arXiv 2505.05470.
    """

    def squared_diffusion(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """η²·σ / (1 − σ)."""
        return self._eta**2 * sigma / (1 - torch.where(sigma == 1, sigma_next, sigma))


class DanceSde(ScaledSde):
    """DanceGRPO's steps: s = η at every level.

    Source: Xue et al., arXiv 2505.07818.
    """

    def squared_diffusion(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """η²."""
        return torch.full_like(sigma, self._eta**2)


class Cps(StochasticSolver):
    """Coefficients-preserving sampling: x' = (1 − σ')·x̂0 + σ'·(cos(η·π/2)·ε̂ + sin(η·π/2)·noise).

    With the predicted clean latents x̂0 = x − σ·v, x' has the share of noise that belongs to σ' after a step of any
    length, while the SDE's steps leave too much. η is at most 1, where all of ε̂ is replaced.

    Source: Wang & Yu, arXiv 2509.05952, and its code, IamCreateAI/FlowCPS, whose log-probability this is: −(x' − μ)²,
    without the division by the variance.
    """

    def __init__(self, eta: float) -> None:
        super().__init__()
        self._angle = eta * math.pi / 2

    def coefficients(self, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_noise = sigma_next * math.cos(self._angle)
        of_clean = 1 - sigma_next
        return of_clean + of_noise, of_noise * (1 - sigma) - of_clean * sigma, sigma_next * math.sin(self._angle)

    def log_density(self, value: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        """−(x' − μ)²."""
        return -((value - mean) ** 2).flatten(1).mean(1)


SDES: Mapping[SdeKind, Callable[[float], StochasticSolver]] = {"flow": FlowSde, "dance": DanceSde, "cps": Cps}
"""Kind of SDE → function of the level η that makes the solver."""


def _column(level: float | Tensor, like: Tensor) -> Tensor:
    """A noise level in float64, shaped so that it multiplies the rows of `like`."""
    column = torch.as_tensor(level, dtype=torch.float64)
    # A single level stays on the CPU, where a scalar needs no copy to the device.
    return column.to(like.device).view(-1, *[1] * (like.ndim - 1)) if column.ndim else column
