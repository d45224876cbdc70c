"""Orders to the pipeline in vLLM-Omni's process and its answers: tensors on the CPU and plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from solrl_core.sampling.sampler import SolverSpec, Trajectory, make_solver

ORDER = "solrl_order"
"""Key of the order in a request's extra arguments."""

Packed = dict[str, Any]
"""A trajectory as tensors and numbers: x, history.0, history.1, …, index, sigma."""


@dataclass(frozen=True)
class Order:
    """Candidates of one prompt.

    Attributes:
        conditioning: the encoded prompt, one row per tensor.
        guidance: 1.0 is none.
        seeds: one per candidate.
        solver: see `SolverSpec`.
        sigmas: the whole schedule.
        shape: shape of one candidate's latents, (channels, height / f, width / f).
    """

    conditioning: Mapping[str, torch.Tensor]
    guidance: float
    seeds: Sequence[int]
    solver: SolverSpec
    sigmas: Sequence[float]
    shape: Sequence[int]

    @property
    def steps(self) -> int:
        """Number of steps to take."""
        return len(self.sigmas) - 1


def as_packed(trajectory: Trajectory) -> Packed:
    """Pack a trajectory."""
    solver = trajectory.solver
    history = {f"history.{index}": tensor.cpu() for index, tensor in enumerate(solver.history)}
    return {"x": trajectory.x.cpu(), **history, "index": trajectory.index, "sigma": solver.sigma}


def from_packed(packed: Packed, solver: SolverSpec) -> Trajectory:
    """Unpack a trajectory of a kind of solver."""
    restored = make_solver(solver)
    restored.history = tuple(packed[f"history.{index}"] for index in range(len(packed) - 3))
    restored.sigma = packed["sigma"]
    return Trajectory(packed["x"], restored, packed["index"])
