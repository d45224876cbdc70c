"""Kinds of training data: the inputs of an algorithm's loss, from regenerated samples.

A kind determines how samples are regenerated, their trainable timesteps, and the micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Self, TypeVar

from solrl_core.devices import upload
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import StochasticSteps

if TYPE_CHECKING:
    import torch
    from solrl_core.families import Conditioning
    from solrl_core.sampling.sampler import Recording, SolverSpec
    from solrl_core.sampling.sde import StochasticSolver


@dataclass(frozen=True)
class TrainingSamples:
    """Regenerated samples, prompt after prompt.

    Attributes:
        latents: clean latents x0, float32 [N, ...].
        advantages: [N].
        conditioning: encoded prompts, a row for each prompt.
        prompts: row of `conditioning` for each sample [N].
        recording: every step of the samples, if the algorithm trains on trajectories.
    """

    latents: torch.Tensor
    advantages: torch.Tensor
    conditioning: Conditioning
    prompts: torch.Tensor
    recording: Recording | None = None

    @property
    def groups(self) -> int:
        """Number of prompts."""
        return len(next(iter(self.conditioning.values())))

    @property
    def kept(self) -> int:
        """Samples per prompt."""
        return len(self.latents) // self.groups

    def conditioning_of(self, rows: torch.Tensor) -> Conditioning:
        """Conditioning of the samples with these indices, one row each."""
        prompts = self.prompts[rows]
        return {name: value[upload(prompts, value.device)] for name, value in self.conditioning.items()}


def index_to(values: torch.Tensor, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rows of `values`, on `device`."""
    return upload(values[upload(rows, values.device)], device)


@dataclass(frozen=True)
class MicroBatch:
    """Points whose velocities one pass computes; the samples of a unit are adjacent.

    Attributes:
        x: latents, float32 [B, ...].
        t: their noise levels [B], in (0, 1].
        advantages: [B].
    """

    x: torch.Tensor
    t: torch.Tensor
    advantages: torch.Tensor

    def rows(self, which: slice) -> Self:
        """Some of the points."""
        import torch

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[which] for name, value in values.items() if torch.is_tensor(value)})


@dataclass(frozen=True)
class ForwardBatch(MicroBatch):
    """Points of the forward process, x = (1 − t)·x0 + t·noise; the samples of a unit share t and noise.

    Attributes:
        x0: clean latents of the samples, float32 [B, ...].
        noise: [B, ...]; the true velocity is noise − x0.
    """

    x0: torch.Tensor
    noise: torch.Tensor


@dataclass(frozen=True)
class TrajectoryBatch(MicroBatch):
    """Steps of recorded trajectories, from x at noise level t to `x_next`, float32 [B, ...].

    Attributes:
        sigma: noise level before the step, float64 [B].
        sigma_next: noise level after it.
        log_prob: log-probability of the step when it was recorded, under the behaviour policy [B].
        solver: solver of the steps.
        levels: noise levels before all recorded steps.
    """

    x_next: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    log_prob: torch.Tensor
    solver: StochasticSolver
    levels: tuple[float, ...] = ()

    def gaussian_under(self, velocity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the steps' Gaussians under a policy's velocity at x; gradients flow."""
        return self.solver.gaussian(self.x, self.sigma, self.sigma_next, velocity)

    def log_prob_under(self, velocity: torch.Tensor) -> torch.Tensor:
        """Log-probability of the recorded steps under a policy's velocity at x [B]; gradients flow through it."""
        return self.solver.log_prob(self.x, self.sigma, self.sigma_next, velocity, self.x_next)


BatchT = TypeVar("BatchT", bound=MicroBatch)


class TrainingData(ABC, Generic[BatchT]):
    """One kind of training data; `recorded` says whether every step of the samples must be recorded."""

    recorded: ClassVar[bool] = False

    def solver(self, default: SolverSpec, steps: int, iteration: int, seed: int) -> SolverSpec:
        """The solver that generates the samples of an iteration with this number of steps.

        `default` is the run's solver, and `seed` the run's seed.
        """
        return default

    def sigmas(self, samples: TrainingSamples, schedule: Sequence[float]) -> Sequence[float]:
        """Noise levels of the trainable steps, steps + 1 values, given the sampler's schedule."""
        return schedule

    def draw(self, units: int, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor | None:
        """Noise for the units of a micro-batch, or None.

        Called for every micro-batch in order, so that the noise does not depend on the rank that trains it.
        """
        return None

    @abstractmethod
    def batch(
        self,
        samples: TrainingSamples,
        rows: torch.Tensor,
        steps: torch.Tensor,
        sigmas: torch.Tensor,
        noise: torch.Tensor | None,
        device: torch.device,
    ) -> BatchT:
        """Build a micro-batch on `device`.

        Args:
            rows: indices of the samples [B], in the order of the units.
            steps: the step of each sample [B].
            sigmas: noise levels of the steps, float64 [steps + 1].
            noise: noise from `draw`, one row per unit.
        """


class ForwardProcess(TrainingData[ForwardBatch]):
    """Clean latents mixed with fresh noise: x_t = (1 − t)·x0 + t·noise."""

    def draw(self, units: int, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        """Fresh noise [units, *shape]."""
        import torch

        return torch.randn(units, *shape, generator=generator)

    def batch(
        self,
        samples: TrainingSamples,
        rows: torch.Tensor,
        steps: torch.Tensor,
        sigmas: torch.Tensor,
        noise: torch.Tensor | None,
        device: torch.device,
    ) -> ForwardBatch:
        """Mix each sample with its unit's noise."""
        assert noise is not None
        x0 = index_to(samples.latents, rows, device)
        noise = upload(noise.repeat_interleave(len(rows) // len(noise), 0), device)
        t = upload(sigmas[steps].float(), device)
        at = t.view(-1, *[1] * (x0.ndim - 1))
        return ForwardBatch((1 - at) * x0 + at * noise, t, index_to(samples.advantages, rows, device), x0, noise)


WindowOrder = Literal["random", "progressive"]
"""random: a place drawn for each iteration. progressive: from the first step to the last, and again."""


@dataclass(frozen=True)
class Window:
    """Position of the stochastic steps, by iteration; all other steps follow the ODE, and are not trained.

    The last step, to σ = 0, is never one of them.

    Attributes:
        size: number of steps; None for all.
        within: share of the steps, from the noisiest, that the window may be in.
        order: see `WindowOrder`.
        every: iterations at each place, if progressive.
    """

    size: int | None = None
    within: float = 1.0
    order: WindowOrder = "random"
    every: int = 1

    def first(self, steps: int, iteration: int, seed: int) -> int:
        """Index of the window's first of a sampler's `steps`; the run's `seed` decides a random place."""
        if self.size is None:
            return 0
        places = max(1, min(int(self.within * steps), steps - 1) - self.size + 1)
        if self.order == "progressive":
            return iteration // self.every % places
        return expand_seeds(seed, f"window/{iteration}", 1)[0] % places

    def around(
        self, solver: StochasticSteps | StochasticSolver, steps: int, iteration: int, seed: int
    ) -> StochasticSteps | StochasticSolver:
        """`solver`, restricted to this iteration's window; `steps`, `iteration` and `seed` place it, see `first`."""
        first = self.first(steps, iteration, seed)
        if isinstance(solver, StochasticSteps):
            return solver.model_copy(update={"first": first, "count": self.size})
        return solver.windowed(first, self.size)


class RecordedTrajectory(TrainingData[TrajectoryBatch]):
    """Steps of a stochastic solver, with their log-probabilities under the behaviour policy."""

    recorded = True

    def __init__(self, solver: StochasticSteps | StochasticSolver, window: Window | None = None) -> None:
        """`window`: steps of `solver` that are stochastic and recorded; None for all that it takes."""
        self._solver = solver
        self._window = window

    def solver(self, default: SolverSpec, steps: int, iteration: int, seed: int) -> SolverSpec:
        """The stochastic solver, in its window of the iteration; the run's solver is not used."""
        if self._window is None:
            return self._solver
        return self._window.around(self._solver, steps, iteration, seed)

    def sigmas(self, samples: TrainingSamples, schedule: Sequence[float]) -> Sequence[float]:
        """The recorded noise levels."""
        return _recording(samples).sigmas

    def batch(
        self,
        samples: TrainingSamples,
        rows: torch.Tensor,
        steps: torch.Tensor,
        sigmas: torch.Tensor,
        noise: torch.Tensor | None,
        device: torch.device,
    ) -> TrajectoryBatch:
        """Look up the recorded steps; there is no fresh noise."""
        from solrl_core.sampling.sampler import make_solver
        from solrl_core.sampling.sde import StochasticSolver

        recording = _recording(samples)
        solver, states, log_probs = make_solver(self._solver), recording.states, recording.log_probs
        assert isinstance(solver, StochasticSolver)
        assert log_probs is not None
        step_rows, sample_rows = (upload(index, states.device) for index in (steps, rows))
        return TrajectoryBatch(
            x=upload(states[step_rows, sample_rows], device),
            t=upload(sigmas[steps].float(), device),
            advantages=index_to(samples.advantages, rows, device),
            x_next=upload(states[step_rows + 1, sample_rows], device),
            sigma=upload(sigmas[steps], device),
            sigma_next=upload(sigmas[steps + 1], device),
            log_prob=upload(log_probs[step_rows, sample_rows], device),
            solver=solver,
            levels=tuple(sigmas[:-1].tolist()),
        )


def _recording(samples: TrainingSamples) -> Recording:
    recording = samples.recording
    assert recording is not None
    if recording.log_probs is None:
        raise ValueError("no step of the samples is stochastic; expected at least two steps, since the last is not")
    return recording
