"""Solvers fitted to a model: a few steps whose weights are chosen to end where many steps do.

Each step of a deterministic solver is a weighted sum of the latents and the model's predictions so far. Here the
weights are least-squares fits to example trajectories of many steps: to the latents at the next noise level, and to the
clean latents. They are a handful of numbers for a whole model. No model weight is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from solrl_proto.rollouts import FittedSolver, ModelBinding
from solrl_proto.rollouts import Solver as SolverName

from solrl_core.fingerprint import model_digest, part_digests
from solrl_core.generator import Generator
from solrl_core.sampler import Trajectory
from solrl_core.solver_specs import make_solver
from solrl_core.solvers import Fitted, weigh

SCHEDULES = ((1.0, 0.85, 0.65, 0.3), (1.0, 0.85, 0.7, 0.4), (1.0, 0.87, 0.7, 0.45), (1.0, 0.87, 0.75, 0.5))
"""Candidate schedules. The first steps decide the layout of the image, the last prediction adds detail."""


@dataclass(frozen=True)
class Examples:
    """Trajectories of the solver to match.

    Attributes:
        texts: one prompt per trajectory.
        seeds: one seed per trajectory.
        made_by: model, solver and guidance of the trajectories.
        sigmas: noise levels at which their latents are known, from 1 to 0.
        latents: float32 [N, ...] at each level.
    """

    texts: list[str]
    seeds: list[int]
    made_by: ModelBinding
    sigmas: list[float]
    latents: list[torch.Tensor]

    def at(self, sigma: float) -> torch.Tensor:
        """Latents at any noise level, interpolated linearly between known levels."""
        after = next(place for place, level in enumerate(self.sigmas) if level <= sigma)
        if after == 0:
            return self.latents[0]
        share = (self.sigmas[after - 1] - sigma) / (self.sigmas[after - 1] - self.sigmas[after])
        return torch.lerp(self.latents[after - 1], self.latents[after], share)


def make_examples(
    generator: Generator, texts: Sequence[str], seeds: Sequence[int], *, steps: int, solver: SolverName, guidance: float
) -> Examples:
    """Generate a trajectory for each prompt and seed, with `steps` steps of a named solver."""
    recording = generator.generate(
        texts, seeds, steps=steps, solver=solver, guidance=guidance, decode=False, record=True
    ).recording
    assert recording is not None
    digest = model_digest(part_digests(generator.backbone.parts))
    made_by = ModelBinding(model=digest, solver=solver, guidance=guidance)
    return Examples(list(texts), list(seeds), made_by, list(recording.sigmas), list(recording.states))


@torch.inference_mode()
def fit(generator: Generator, examples: Examples, sigmas: Sequence[float]) -> FittedSolver:
    """Fit the solver with one step at each of `sigmas` that best follows the examples.

    Args:
        generator: generator at the precision of the examples. (At a coarser precision, predictions are noisier and the
            least-squares fit blurs the images: the mean error is smaller, but the ranking is worse.)
        examples: trajectories to match.
        sigmas: 1.0 first, descending, above 0.
    """
    moves: list[tuple[float, ...]] = []
    ends: list[tuple[float, ...]] = []
    at = Trajectory(examples.latents[0], make_solver(identity_solver(sigmas)))
    for step in range(len(sigmas)):
        evaluated = generator.generate(
            examples.texts,
            examples.seeds,
            steps=len(sigmas),
            guidance=examples.made_by.guidance,
            start=at,
            until=step + 1,
            decode=False,
        ).trajectory
        assert isinstance(evaluated.solver, Fitted)
        parts = (at.x, *evaluated.solver.predictions)
        ends.append(_least_squares(parts, examples.latents[-1]))
        if step + 1 < len(sigmas):
            moves.append(_least_squares(parts, examples.at(sigmas[step + 1])))
            at = Trajectory(weigh(moves[-1], parts), evaluated.solver, step + 1)
    return FittedSolver(sigmas=tuple(sigmas), moves=tuple(moves), ends=tuple(ends), fitted_for=examples.made_by)


def identity_solver(sigmas: Sequence[float]) -> FittedSolver:
    """A solver that evaluates the model at each of `sigmas` and leaves the latents unchanged; a fit starts from it."""
    rows = [(1.0, *[0.0] * (step + 1)) for step in range(len(sigmas))]
    return FittedSolver(sigmas=tuple(sigmas), moves=tuple(rows[:-1]), ends=tuple(rows))


def _least_squares(parts: Sequence[torch.Tensor], target: torch.Tensor) -> tuple[float, ...]:
    """Weights of the parts whose sum is closest to the target over all elements, by normal equations in float64."""
    columns = torch.stack([part.flatten() for part in parts]).double()
    products = columns @ columns.T
    # Predictions of neighbouring steps may be almost equal. The ridge is too small to affect the weights otherwise.
    ridge = 1e-9 * products.diagonal().mean() * torch.eye(len(parts), dtype=products.dtype, device=products.device)
    found: list[float] = torch.linalg.solve(products + ridge, columns @ target.flatten().double()).tolist()
    return tuple(found)
