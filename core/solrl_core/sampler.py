"""Deterministic flow-matching ODE solvers. They know velocities and sigmas, and nothing of models."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from solrl_core.pace import upload

Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(latents [B, ...] at sigma, sigma) → velocity [B, ...] float32."""


@dataclass(frozen=True)
class Trajectory:
    """Candidates on their way from noise to clean latents.

    Attributes:
        x: latents at sigmas[index], float32 [B, ...].
        index: steps taken.
        clean: clean latents as the last step predicted them; those themselves after the last of all. None before any.
    """

    x: torch.Tensor
    index: int = 0
    clean: torch.Tensor | None = None

    def rows(self, which: slice | Sequence[int]) -> "Trajectory":
        """Some of the candidates."""
        return replace(self, x=self.x[which], clean=None if self.clean is None else self.clean[which])

    def to(self, device: torch.device) -> "Trajectory":
        """The same on another device."""
        clean = None if self.clean is None else upload(self.clean, device)
        return replace(self, x=upload(self.x, device), clean=clean)

    @staticmethod
    def join(parts: Sequence["Trajectory"]) -> "Trajectory":
        """Candidates of several, which have taken equally many steps."""
        clean = [part.clean for part in parts if part.clean is not None]
        return replace(parts[0], x=torch.cat([part.x for part in parts]), clean=torch.cat(clean) if clean else None)


def solve(
    velocity: Velocity,
    noise: torch.Tensor,
    sigmas: Sequence[float],
    solver: str = "euler",
    between: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Integrate from noise at sigmas[0] to clean latents; see `advance`."""
    return advance(velocity, Trajectory(noise), sigmas, solver, between=between).x


def advance(
    velocity: Velocity,
    trajectory: Trajectory,
    sigmas: Sequence[float],
    solver: str = "euler",
    *,
    until: int | None = None,
    between: Callable[[], None] | None = None,
) -> Trajectory:
    """Take a trajectory's next steps.

    Args:
        velocity: the model's dx/dσ.
        trajectory: where to go on; not changed.
        sigmas: descending, from 1 to 0; one step between each two.
        solver: one of `SOLVERS`.
        until: how many steps are to be behind it in the end; None for all.
        between: called before each step; raise from it to stop.

    Raises:
        ValueError: unknown solver, fewer than two sigmas, or steps that are not there.
    """
    if solver not in SOLVERS:
        raise ValueError(f"got solver {solver!r}; expected one of {sorted(SOLVERS)}")
    if len(sigmas) < 2:
        raise ValueError(f"got {len(sigmas)} sigmas; expected at least 2, from 1 down to 0")
    until = len(sigmas) - 1 if until is None else until
    if not trajectory.index <= until < len(sigmas):
        raise ValueError(f"got until={until}; expected {trajectory.index} to {len(sigmas) - 1} steps")
    x, clean = trajectory.x, trajectory.clean
    for index in range(trajectory.index, until):
        if between is not None:
            between()
        x, clean = SOLVERS[solver](sigmas, index, x, velocity(x, sigmas[index]), clean)
    return Trajectory(x, until, clean)


Step = Callable[
    [Sequence[float], int, torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]
]
"""(sigmas, index, latents at sigmas[index], their velocity, the prediction before) → (latents at the next sigma,
prediction of the clean latents)."""


def euler(
    sigmas: Sequence[float], index: int, x: torch.Tensor, v: torch.Tensor, before: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Euler's method on dx/dσ."""
    now, then = sigmas[index], sigmas[index + 1]
    return x + (then - now) * v, x - now * v


def dpm2(
    sigmas: Sequence[float], index: int, x: torch.Tensor, v: torch.Tensor, before: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """DPM-Solver++(2M), which extrapolates the predictions of clean latents over λ = log((1 − σ)/σ).

    Where x = (1 − σ)·x0 + σ·ε, the exact solution for a constant prediction x̂0 is
    x' = (σ'/σ)·x + (1 − σ'/σ)·x̂0, and the second order replaces x̂0 by its extrapolation to the middle of the step
    in λ from this prediction and the one before. The first step has none before it, and the last has no finite
    λ: they are of first order, as Euler's. Nor does a step after σ = 1 gain from the one before, infinitely far.

    Source: Lu et al., arXiv 2211.01095, algorithm 2.
    """
    now, then = sigmas[index], sigmas[index + 1]
    clean = x - now * v
    towards = clean
    if before is not None and index < len(sigmas) - 2:
        here = log_snr(now)
        weight = (log_snr(then) - here) / (2 * (here - log_snr(sigmas[index - 1])))
        towards = clean + weight * (clean - before)
    return then / now * x + (1 - then / now) * towards, clean


def log_snr(sigma: float) -> float:
    """λ = log((1 − σ)/σ) for σ in (0, 1], half the logarithm of the signal-to-noise ratio; −∞ for 1."""
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf


SOLVERS: Mapping[str, Step] = {"euler": euler, "dpm2": dpm2}


def unshifted_sigmas(steps: int) -> list[float]:
    """linspace from 1 to 0 with `steps` steps: `steps + 1` values."""
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
