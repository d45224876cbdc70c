"""Trajectories from noise to clean latents, all or part of the way, and the solvers that plans specify."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from solrl_proto.rollouts import FittedSolver, StochasticSteps

from solrl_core.devices import upload
from solrl_core.sampling.sde import SDES
from solrl_core.sampling.solvers import Dpm2, Euler, Fitted, Solver

Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(latents [B, ...] at sigma, sigma) → velocity [B, ...] float32."""
SOLVERS: Mapping[str, Callable[[], Solver]] = {"euler": Euler, "dpm2": Dpm2}
"""Solvers of the ODE that a request can name."""

SolverSpec = str | FittedSolver | StochasticSteps | Solver
"""A solver's name, fitted weights, stochastic steps, or a solver that has taken no step yet."""


def make_solver(spec: SolverSpec) -> Solver:
    """A solver for a new trajectory.

    Raises:
        ValueError: unknown name.
    """
    if isinstance(spec, Solver):
        return spec.copy()
    if isinstance(spec, FittedSolver):
        return Fitted(spec)
    if isinstance(spec, StochasticSteps):
        return SDES[spec.kind](spec.eta).windowed(spec.first, spec.count)
    if spec not in SOLVERS:
        raise ValueError(f"got solver {spec!r}; expected one of {sorted(SOLVERS)}")
    return SOLVERS[spec]()


@dataclass(frozen=True)
class Trajectory:
    """Candidates on their way from noise to clean latents.

    Attributes:
        x: latents after `index` steps, float32 [B, ...].
        solver: takes the next steps.
        index: number of steps taken.
    """

    x: torch.Tensor
    solver: Solver
    index: int = 0

    @property
    def clean(self) -> torch.Tensor | None:
        """Clean latents as predicted now; after the last step the candidates themselves. None before any step."""
        return self.solver.clean

    def rows(self, which: slice | Sequence[int]) -> "Trajectory":
        """Some of the candidates."""
        return Trajectory(self.x[which], self.solver.rows(which), self.index)

    def to(self, device: torch.device) -> "Trajectory":
        """The same on another device."""
        return Trajectory(upload(self.x, device), self.solver.to(device), self.index)

    @staticmethod
    def join(parts: Sequence["Trajectory"]) -> "Trajectory":
        """The candidates of several trajectories that took the same steps with one kind of solver."""
        solver = parts[0].solver.join([part.solver for part in parts[1:]])
        return Trajectory(torch.cat([part.x for part in parts]), solver, parts[0].index)


@dataclass(frozen=True)
class Recording:
    """Consecutive steps of some candidates: all steps of an ODE, the noisy steps of a stochastic solver.

    Attributes:
        sigmas: noise levels of the states, steps + 1 values.
        states: latents at each level, float32 [steps + 1, N, ...].
        log_probs: log-probability of each step [steps, N]; None for an ODE.
    """

    sigmas: tuple[float, ...]
    states: torch.Tensor
    log_probs: torch.Tensor | None

    @staticmethod
    def join(parts: Sequence["Recording"]) -> "Recording":
        """The candidates of several recordings of the same steps."""
        log_probs = [part.log_probs for part in parts if part.log_probs is not None]
        states = torch.cat([part.states for part in parts], 1)
        return Recording(parts[0].sigmas, states, torch.cat(log_probs, 1) if log_probs else None)

    def rows(self, which: slice | Sequence[int]) -> "Recording":
        log_probs = None if self.log_probs is None else self.log_probs[:, which]
        return Recording(self.sigmas, self.states[:, which], log_probs)


class Recorder:
    """Collects the steps of one trajectory."""

    def __init__(self, start: Trajectory) -> None:
        self._begin = start.index
        self._states = [start.x]
        self._log_probs: list[torch.Tensor | None] = []

    def add(self, x: torch.Tensor, log_prob: torch.Tensor | None) -> None:
        self._states.append(x)
        self._log_probs.append(log_prob)

    def recording(self, sigmas: Sequence[float], rows: slice) -> Recording:
        """The steps of some candidates; `sigmas` is the whole schedule. Steps with noise must be consecutive."""
        noisy = [index for index, log_prob in enumerate(self._log_probs) if log_prob is not None]
        first, end = (noisy[0], noisy[-1] + 1) if noisy else (0, len(self._log_probs))
        log_probs = [log_prob for log_prob in self._log_probs[first:end] if log_prob is not None]
        assert len(log_probs) in (0, end - first)
        return Recording(
            tuple(sigmas[self._begin + first : self._begin + end + 1]),
            torch.stack(self._states[first : end + 1])[:, rows],
            torch.stack(log_probs)[:, rows] if log_probs else None,
        )


def solve(
    velocity: Velocity,
    noise: torch.Tensor,
    sigmas: Sequence[float],
    solver: SolverSpec = "euler",
    between: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Integrate an ODE from noise at sigmas[0] to clean latents; see `advance`."""
    return advance(velocity, Trajectory(noise, make_solver(solver)), sigmas, between=between).x


def advance(
    velocity: Velocity,
    trajectory: Trajectory,
    sigmas: Sequence[float],
    *,
    until: int | None = None,
    between: Callable[[], None] | None = None,
    noise: Callable[[int], torch.Tensor] | None = None,
    recorder: Recorder | None = None,
) -> Trajectory:
    """Take a trajectory's next steps.

    Args:
        velocity: the model's dx/dσ.
        trajectory: where to continue; not changed.
        sigmas: the whole schedule, descending from 1 to 0, with one step between each two (`Solver.schedule`).
        until: number of steps taken at the end; None for all.
        between: called before each step; raise from it to stop.
        noise: index of a step → its standard normal noise [B, ...]; called for the noisy steps of a stochastic solver.
        recorder: called for each step.

    Raises:
        ValueError: fewer than two sigmas, steps that the schedule does not have, or a noisy step without noise.
    """
    if len(sigmas) < 2:
        raise ValueError(f"got {len(sigmas)} sigmas; expected at least 2, from 1 down to 0")
    until = len(sigmas) - 1 if until is None else until
    if not trajectory.index <= until < len(sigmas):
        raise ValueError(f"got until={until}; expected {trajectory.index} to {len(sigmas) - 1} steps")
    x, solver = trajectory.x, trajectory.solver.copy()
    for index in range(trajectory.index, until):
        if between is not None:
            between()
        fresh = None
        if solver.noisy(index, sigmas[index + 1]):
            if noise is None:
                raise ValueError("got no noise for a step of a stochastic solver; expected a function that draws it")
            fresh = noise(index)
        x, log_prob = solver.step(x, sigmas[index], sigmas[index + 1], velocity(x, sigmas[index]), fresh)
        if recorder is not None:
            recorder.add(x, log_prob)
    return Trajectory(x, solver, until)


def unshifted_sigmas(steps: int) -> list[float]:
    """linspace from 1 to 0 with `steps` steps: `steps + 1` values."""
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
