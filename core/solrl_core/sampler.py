"""Deterministic flow-matching ODE solvers. They know velocities and sigmas, and nothing of models."""

import itertools
from collections.abc import Callable, Sequence

import torch

Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(latents [B, ...] at sigma, sigma) → velocity [B, ...] float32."""


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
        solver: "euler".
        between: called before each step; raise from it to stop.

    Raises:
        ValueError: unknown solver, or fewer than two sigmas.
    """
    if solver != "euler":
        raise ValueError(f"got solver {solver!r}; expected 'euler'")
    if len(sigmas) < 2:
        raise ValueError(f"got {len(sigmas)} sigmas; expected at least 2, from 1 down to 0")
    x = noise
    for now, then in itertools.pairwise(sigmas):
        if between is not None:
            between()
        x = x + (then - now) * velocity(x, now)
    return x


def unshifted_sigmas(steps: int) -> list[float]:
    """linspace from 1 to 0 with `steps` steps: `steps + 1` values."""
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
