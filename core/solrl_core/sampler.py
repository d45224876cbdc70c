"""Deterministic flow-matching ODE solvers. They know velocities and sigmas, and nothing of models."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from solrl_proto.rollouts import FittedSolver

from solrl_core.pace import upload

Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(latents [B, ...] at sigma, sigma) → velocity [B, ...] float32."""


@dataclass(frozen=True)
class Trajectory:
    """Candidates on their way from noise to clean latents.

    Attributes:
        x: latents at sigmas[index], float32 [B, ...].
        index: steps taken.
        predictions: clean latents as the model predicted them in the steps taken, as far as the next ones need them.
        foreseen: clean latents as a fitted solver weighs them from those; None where the last prediction is all.
    """

    x: torch.Tensor
    index: int = 0
    predictions: tuple[torch.Tensor, ...] = ()
    foreseen: torch.Tensor | None = None

    @property
    def clean(self) -> torch.Tensor | None:
        """Clean latents as predicted by now; those themselves after the last step of all. None before any."""
        if self.foreseen is not None:
            return self.foreseen
        return self.predictions[-1] if self.predictions else None

    def rows(self, which: slice | Sequence[int]) -> "Trajectory":
        """Some of the candidates."""
        return self._each(lambda tensor: tensor[which])

    def to(self, device: torch.device) -> "Trajectory":
        """The same on another device."""
        return self._each(lambda tensor: upload(tensor, device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Trajectory":
        foreseen = None if self.foreseen is None else change(self.foreseen)
        return replace(self, x=change(self.x), predictions=tuple(map(change, self.predictions)), foreseen=foreseen)

    @staticmethod
    def join(parts: Sequence["Trajectory"]) -> "Trajectory":
        """Candidates of several, which have taken equally many steps of one solver."""
        foreseen = [part.foreseen for part in parts if part.foreseen is not None]
        return replace(
            parts[0],
            x=torch.cat([part.x for part in parts]),
            predictions=tuple(map(torch.cat, zip(*(part.predictions for part in parts), strict=True))),
            foreseen=torch.cat(foreseen) if foreseen else None,
        )


def solve(
    velocity: Velocity,
    noise: torch.Tensor,
    sigmas: Sequence[float],
    solver: str | FittedSolver = "euler",
    between: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Integrate from noise at sigmas[0] to clean latents; see `advance`."""
    return advance(velocity, Trajectory(noise), sigmas, solver, between=between).x


def advance(
    velocity: Velocity,
    trajectory: Trajectory,
    sigmas: Sequence[float],
    solver: str | FittedSolver = "euler",
    *,
    until: int | None = None,
    between: Callable[[], None] | None = None,
) -> Trajectory:
    """Take a trajectory's next steps.

    Args:
        velocity: the model's dx/dσ.
        trajectory: where to go on; not changed.
        sigmas: descending, from 1 to 0; one step between each two. A fitted solver's are its own: see `schedule`.
        solver: one of `SOLVERS`, or one that was fitted.
        until: how many steps are to be behind it in the end; None for all.
        between: called before each step; raise from it to stop.

    Raises:
        ValueError: unknown solver, fewer than two sigmas, or steps that are not there.
    """
    if isinstance(solver, str) and solver not in SOLVERS:
        raise ValueError(f"got solver {solver!r}; expected one of {sorted(SOLVERS)}")
    if len(sigmas) < 2:
        raise ValueError(f"got {len(sigmas)} sigmas; expected at least 2, from 1 down to 0")
    until = len(sigmas) - 1 if until is None else until
    if not trajectory.index <= until < len(sigmas):
        raise ValueError(f"got until={until}; expected {trajectory.index} to {len(sigmas) - 1} steps")
    x, predictions, foreseen = trajectory.x, trajectory.predictions, trajectory.foreseen
    for index in range(trajectory.index, until):
        if between is not None:
            between()
        v = velocity(x, sigmas[index])
        predictions = (*predictions, x - sigmas[index] * v)
        if isinstance(solver, str):
            x, predictions = SOLVERS[solver](sigmas, index, x, v, predictions), predictions[-1:]
        else:
            parts = (x, *predictions)
            foreseen = weigh(solver.ends[index], parts)
            x = weigh(solver.moves[index], parts) if index < len(solver.moves) else foreseen
    return Trajectory(x, until, predictions, foreseen)


def schedule(solver: str | FittedSolver, steps: int, of_model: Callable[[int], list[float]]) -> list[float]:
    """The `steps + 1` sigmas that a solver goes along: the model's, or those that it was fitted for."""
    return of_model(steps) if isinstance(solver, str) else [*solver.sigmas, 0.0]


def weigh(weights: Sequence[float], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weighted sum of equally shaped tensors."""
    total = weights[0] * parts[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = total.add(part, alpha=weight)
    return total


Step = Callable[[Sequence[float], int, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""(sigmas, index, latents at sigmas[index], their velocity, predictions of the clean latents, this step's last) →
latents at the next sigma."""


def euler(
    sigmas: Sequence[float], index: int, x: torch.Tensor, v: torch.Tensor, predictions: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Euler's method on dx/dσ."""
    return x + (sigmas[index + 1] - sigmas[index]) * v


def dpm2(
    sigmas: Sequence[float], index: int, x: torch.Tensor, v: torch.Tensor, predictions: Sequence[torch.Tensor]
) -> torch.Tensor:
    """DPM-Solver++(2M), which extrapolates the predictions of clean latents over λ = log((1 − σ)/σ).

    Where x = (1 − σ)·x0 + σ·ε, the exact solution for a constant prediction x̂0 is
    x' = (σ'/σ)·x + (1 − σ'/σ)·x̂0, and the second order replaces x̂0 by its extrapolation to the middle of the step
    in λ from this prediction and the one before. The first step has none before it, and the last has no finite
    λ: they are of first order, as Euler's. Nor does a step after σ = 1 gain from the one before, infinitely far.

    Source: Lu et al., arXiv 2211.01095, algorithm 2.
    """
    now, then = sigmas[index], sigmas[index + 1]
    clean = towards = predictions[-1]
    if len(predictions) > 1 and index < len(sigmas) - 2:
        here = log_snr(now)
        weight = (log_snr(then) - here) / (2 * (here - log_snr(sigmas[index - 1])))
        towards = clean + weight * (clean - predictions[-2])
    return then / now * x + (1 - then / now) * towards


def log_snr(sigma: float) -> float:
    """λ = log((1 − σ)/σ) for σ in (0, 1], half the logarithm of the signal-to-noise ratio; −∞ for 1."""
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf


SOLVERS: Mapping[str, Step] = {"euler": euler, "dpm2": dpm2}


def unshifted_sigmas(steps: int) -> list[float]:
    """linspace from 1 to 0 with `steps` steps: `steps + 1` values."""
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
