"""Deterministic flow-matching ODE solvers. They know velocities and sigmas, and nothing of models."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(latents [B, ...] at sigma, sigma) → velocity [B, ...] float32."""
Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(latents, their velocity, index of their sigma) → latents at the next sigma; called once for each, in order."""


def solve(
    velocity: Velocity,
    noise: torch.Tensor,
    sigmas: Sequence[float],
    solver: str = "euler",
    between: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Integrate from noise to clean latents.

    Args:
        velocity: the model's dx/dσ.
        noise: latents at sigmas[0], float32 [B, ...].
        sigmas: descending, from 1 to 0; one step between each two.
        solver: one of `SOLVERS`.
        between: called before each step; raise from it to stop.

    Raises:
        ValueError: unknown solver, or fewer than two sigmas.
    """
    if solver not in SOLVERS:
        raise ValueError(f"got solver {solver!r}; expected one of {sorted(SOLVERS)}")
    if len(sigmas) < 2:
        raise ValueError(f"got {len(sigmas)} sigmas; expected at least 2, from 1 down to 0")
    step, x = SOLVERS[solver](sigmas), noise
    for index, sigma in enumerate(sigmas[:-1]):
        if between is not None:
            between()
        x = step(x, velocity(x, sigma), index)
    return x


def euler(sigmas: Sequence[float]) -> Step:
    """Euler's method on dx/dσ."""

    def step(x: torch.Tensor, v: torch.Tensor, index: int) -> torch.Tensor:
        return x + (sigmas[index + 1] - sigmas[index]) * v

    return step


def dpm2(sigmas: Sequence[float]) -> Step:
    """DPM-Solver++(2M), which extrapolates the predictions of clean latents over λ = log((1 − σ)/σ).

    Where x = (1 − σ)·x0 + σ·ε, the exact solution for a constant prediction x̂0 is
    x' = (σ'/σ)·x + (1 − σ'/σ)·x̂0, and the second order replaces x̂0 by its extrapolation to the middle of the step
    in λ from this prediction and the one before. The first step has none before it, and the last has no finite
    λ: they are of first order, as Euler's. Nor does a step after σ = 1 gain from the one before, infinitely far.

    Source: Lu et al., arXiv 2211.01095, algorithm 2.
    """
    last = len(sigmas) - 2
    before = torch.empty(0)

    def step(x: torch.Tensor, v: torch.Tensor, index: int) -> torch.Tensor:
        nonlocal before
        now, then = sigmas[index], sigmas[index + 1]
        clean = x - now * v
        towards = clean
        if 0 < index < last:
            here = log_snr(now)
            weight = (log_snr(then) - here) / (2 * (here - log_snr(sigmas[index - 1])))
            towards = clean + weight * (clean - before)
        before = clean
        return then / now * x + (1 - then / now) * towards

    return step


def log_snr(sigma: float) -> float:
    """λ = log((1 − σ)/σ) for σ in (0, 1], half the logarithm of the signal-to-noise ratio; −∞ for 1."""
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf


SOLVERS: Mapping[str, Callable[[Sequence[float]], Step]] = {"euler": euler, "dpm2": dpm2}
"""Solver name → its steps over given sigmas."""


def unshifted_sigmas(steps: int) -> list[float]:
    """linspace from 1 to 0 with `steps` steps: `steps + 1` values."""
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
