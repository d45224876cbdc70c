"""Orders to the pipeline in vLLM-Omni's process and its answers: tensors on the CPU and plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from solrl_core.sampling.sampler import Trajectory
from solrl_core.sampling.solver_specs import SolverSpec, make_solver

ORDER = "solrl_order"
"""Key of the order in a request's extra arguments."""

Packed = dict[str, Any]
"""A trajectory as tensors and numbers: x, history.0, history.1, …, index, sigma."""


@dataclass(frozen=True)
class Order:
    """Steps of some candidates of one prompt.

    Attributes:
        conditioning: the encoded prompt, one row per tensor.
        guidance: 1.0 is none.
        seeds: one per candidate.
        solver: see `solrl_core.sampling.solver_specs`.
        sigmas: the whole schedule.
        until: number of steps that the candidates have completed at the end.
        start: trajectory to continue, one row per seed; None for the seeds' noise.
        shape: shape of one candidate's latents, (channels, height / f, width / f).
    """

    conditioning: Mapping[str, torch.Tensor]
    guidance: float
    seeds: Sequence[int]
    solver: SolverSpec
    sigmas: Sequence[float]
    until: int
    start: Packed | None
    shape: Sequence[int]

    @property
    def steps(self) -> int:
        """Number of steps to take."""
        return self.until - (self.start["index"] if self.start is not None else 0)


def as_packed(trajectory: Trajectory) -> Packed:
    """Pack a trajectory."""
    solver = trajectory.solver
    history = {f"history.{index}": tensor.cpu() for index, tensor in enumerate(solver.history)}
    return {"x": trajectory.x.cpu(), **history, "index": trajectory.index, "sigma": solver.sigma}


def from_packed(packed: Packed, solver: SolverSpec) -> Trajectory:
    """Unpack a trajectory of a kind of solver."""
    made = make_solver(solver)
    made.history = tuple(packed[f"history.{index}"] for index in range(len(packed) - 3))
    made.sigma = packed["sigma"]
    return Trajectory(packed["x"], made, packed["index"])
