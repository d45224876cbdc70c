"""Fitting a solver to a model: few steps whose weights are chosen so that they end where many steps do.

Every step of a deterministic solver is a weighted sum of the latents and of what the model has predicted so far. Here
the weights are those of least squares over example trajectories of the many steps: of the latents at the next noise
level, and of the clean ones. A handful of numbers for a whole model; nothing of it is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from solrl_proto.rollouts import FittedSolver, ModelBinding
from solrl_proto.rollouts import Solver as SolverName

from solrl_core.fingerprint import model_digest, part_digests
from solrl_core.generator import Generator
from solrl_core.sampler import Trajectory
from solrl_core.solvers import Fitted, make_solver, weigh

SCHEDULES = ((1.0, 0.85, 0.65, 0.3), (1.0, 0.85, 0.7, 0.4), (1.0, 0.87, 0.7, 0.45), (1.0, 0.87, 0.75, 0.5))
"""Noise levels worth a try: what is made is decided in the first steps, and the last prediction is a fine one."""


@dataclass(frozen=True)
class Examples:
    """Trajectories of the solver that is to be matched.

    Attributes:
        texts: a prompt for each.
        seeds: one for each.
        made_by: the model, solver and guidance of the trajectories.
        sigmas: where their latents are known, from 1 to 0.
        latents: float32 [N, ...] at each of them.
    """

    texts: list[str]
    seeds: list[int]
    made_by: ModelBinding
    sigmas: list[float]
    latents: list[torch.Tensor]

    def at(self, sigma: float) -> torch.Tensor:
        """Latents at any noise level: between two known ones they lie on a straight line, as the solvers go."""
        after = next(place for place, level in enumerate(self.sigmas) if level <= sigma)
        if after == 0:
            return self.latents[0]
        share = (self.sigmas[after - 1] - sigma) / (self.sigmas[after - 1] - self.sigmas[after])
        return torch.lerp(self.latents[after - 1], self.latents[after], share)


def make_examples(
    generator: Generator, texts: Sequence[str], seeds: Sequence[int], *, steps: int, solver: SolverName, guidance: float
) -> Examples:
    """Trajectories from a prompt and a seed each, by `steps` steps of a named solver."""
    recording = generator.generate(
        texts, seeds, steps=steps, solver=solver, guidance=guidance, decode=False, record=True
    ).recording
    assert recording is not None
    digest = model_digest(part_digests(generator.backbone.parts))
    made_by = ModelBinding(model=digest, solver=solver, guidance=guidance)
    return Examples(list(texts), list(seeds), made_by, list(recording.sigmas), list(recording.states))


@torch.inference_mode()
def fit(generator: Generator, examples: Examples, sigmas: Sequence[float]) -> FittedSolver:
    """The solver with one step at each of `sigmas` that follows the examples best.

    Args:
        generator: of the precision that made the examples. (One that rounds more makes predictions noisier, which
            least squares answer by blurring: it ranks worse, though its mean error is smaller.)
        examples: what is matched.
        sigmas: 1.0 first, descending, above 0.
    """
    moves: list[tuple[float, ...]] = []
    ends: list[tuple[float, ...]] = []
    at = Trajectory(examples.latents[0], make_solver(standing_still(sigmas)))
    for step in range(len(sigmas)):
        asked = generator.generate(
            examples.texts,
            examples.seeds,
            steps=len(sigmas),
            guidance=examples.made_by.guidance,
            begin=at,
            until=step + 1,
            decode=False,
        ).trajectory
        assert isinstance(asked.solver, Fitted)
        parts = (at.x, *asked.solver.predictions)
        ends.append(_least_squares(parts, examples.latents[-1]))
        if step + 1 < len(sigmas):
            moves.append(_least_squares(parts, examples.at(sigmas[step + 1])))
            at = Trajectory(weigh(moves[-1], parts), asked.solver, step + 1)
    return FittedSolver(sigmas=tuple(sigmas), moves=tuple(moves), ends=tuple(ends), fitted_for=examples.made_by)


def standing_still(sigmas: Sequence[float]) -> FittedSolver:
    """A solver that asks the model at each of `sigmas` and moves nothing: what is fitted starts from it."""
    rows = [(1.0, *[0.0] * (step + 1)) for step in range(len(sigmas))]
    return FittedSolver(sigmas=tuple(sigmas), moves=tuple(rows[:-1]), ends=tuple(rows))


def _least_squares(parts: Sequence[torch.Tensor], target: torch.Tensor) -> tuple[float, ...]:
    """Weights of the parts whose sum is nearest to the target, over all elements; by normal equations in float64."""
    columns = torch.stack([part.flatten() for part in parts]).double()
    products = columns @ columns.T
    # Predictions of neighbouring steps may be all but equal; far below what the weights mean.
    ridge = 1e-9 * products.diagonal().mean() * torch.eye(len(parts), dtype=products.dtype, device=products.device)
    found: list[float] = torch.linalg.solve(products + ridge, columns @ target.flatten().double()).tolist()
    return tuple(found)
