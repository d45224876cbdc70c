"""Solvers fitted to a model: a few steps whose weights are chosen to end where many steps do.

Each step of a deterministic solver is a weighted sum of the latents and the model's predictions so far. Here the
weights are least-squares fits to example trajectories of many steps: to the latents at the next noise level, and to the
clean latents. Gauss-Newton rounds over the weights and noise levels then bring the end of the last step nearer to the
clean latents. They are a handful of numbers for a whole model. No model weight is trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from solrl_proto.rollouts import MAX_WEIGHT, FittedSolver, ModelBinding
from solrl_proto.rollouts import Solver as SolverName

from solrl_core.fingerprint import model_digest, part_digests
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.sampler import Trajectory, make_solver
from solrl_core.sampling.solvers import Fitted, weigh

SCHEDULES = ((1.0, 0.85, 0.65, 0.3), (1.0, 0.85, 0.7, 0.4), (1.0, 0.87, 0.7, 0.45), (1.0, 0.87, 0.75, 0.5))
"""Candidate schedules. The first steps decide the layout of the image, the last prediction adds detail."""
ROUNDS = 2
"""Rounds of refining, at most. The second already gains little."""
_NUDGE = 0.03
"""Change of a weight or noise level for measuring derivatives: above the rounding errors of BF16."""
_DAMPING = 1e-3
"""Share of each derivative's mean square that is added to it, so that a round does not leave where it is valid."""


@dataclass(frozen=True)
class Examples:
    """Trajectories of the solver to match.

    Attributes:
        texts: one prompt per trajectory.
        seeds: one seed per trajectory.
        made_by: model, solver and guidance of the trajectories.
        sigmas: noise levels of `latents`, from 1 to 0, such as (1.0, 0.87, …, 0.0).
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
def fit(generator: Generator, examples: Examples, sigmas: Sequence[float], rounds: int = ROUNDS) -> FittedSolver:
    """Fit the solver with one step at each of `sigmas` that best follows the examples.

    Each step is first fitted to the examples' latents at its end. Then all are refined together, so that the last one
    ends nearest to the clean latents.

    Args:
        generator: generator at the precision of the examples. (At a coarser precision, predictions are noisier and the
            least-squares fit blurs the images: the mean error is smaller, but the ranking is worse.)
        examples: trajectories to match. Refining on few prompts, such as four, fits other prompts worse.
        sigmas: 1.0 first, descending, above 0. Refining changes all but the first.
        rounds: most rounds of refining.
    """
    path = _Path.follow(generator, examples, sigmas)
    for _ in range(rounds):
        refined = path.refined()
        if refined is None:
            break
        path = refined
    return path.solver


@dataclass(frozen=True)
class _Path:
    """The examples on the way of a solver.

    Attributes:
        solver: fitted to the examples.
        points: the examples before each step.
        parts: what each step weighs: the latents before it, and all predictions so far.
        error: mean squared error of the last step's end.
    """

    generator: Generator
    examples: Examples
    solver: FittedSolver
    points: list[Trajectory]
    parts: list[tuple[torch.Tensor, ...]]
    error: float

    @staticmethod
    def follow(
        generator: Generator, examples: Examples, sigmas: Sequence[float], step_coeffs: Sequence[tuple[float, ...]] = ()
    ) -> "_Path":
        """Take each step with its known coefficients, or fit them to the examples; fit x0_coeffs."""
        step_coeffs, x0_coeffs, parts = list(step_coeffs), [], []
        points = [Trajectory(examples.latents[0], make_solver(identity_solver(sigmas)))]
        for step in range(len(sigmas)):
            solver = _continued(generator, examples, points[step], step + 1).solver
            assert isinstance(solver, Fitted)
            parts.append((points[step].x, *solver.predictions))
            x0_coeffs.append(_least_squares(parts[step], examples.latents[-1]))
            if step + 1 < len(sigmas):
                if step == len(step_coeffs):
                    step_coeffs.append(_least_squares(parts[step], examples.at(sigmas[step + 1])))
                points.append(Trajectory(weigh(step_coeffs[step], parts[step]), solver, step + 1))
        fitted = FittedSolver(
            sigmas=tuple(sigmas),
            step_coeffs=tuple(step_coeffs),
            x0_coeffs=tuple(x0_coeffs),
            fitted_for=examples.made_by,
        )
        error = (weigh(x0_coeffs[-1], parts[-1]) - examples.latents[-1]).square().mean()
        return _Path(generator, examples, fitted, points, parts, float(error))

    def refined(self) -> "_Path | None":
        """The path after a Gauss-Newton round over all coefficients and noise levels; None if it is not better."""
        end = weigh(self.solver.x0_coeffs[-1], self.parts[-1])
        columns = [(latents - end) / _NUDGE for latents in (*self._with_other_steps(), *self._with_other_sigmas())]
        changes = iter(_least_squares((*columns, *self.parts[-1]), self.examples.latents[-1] - end, _DAMPING))
        step_coeffs = [tuple(weight + next(changes) for weight in row) for row in self.solver.step_coeffs]
        first, *later_sigmas = self.solver.sigmas
        sigmas = [first, *(round(sigma + next(changes), 3) for sigma in later_sigmas)]
        in_order = all(0 < later < earlier for earlier, later in pairwise(sigmas))
        if not in_order or not all(abs(weight) <= MAX_WEIGHT for row in step_coeffs for weight in row):
            return None
        path = _Path.follow(self.generator, self.examples, sigmas, step_coeffs)
        return path if path.error < self.error else None

    def _with_other_steps(self) -> Iterator[torch.Tensor]:
        """Ends after a nudge of each weight of each step: its part is added to the next latents."""
        for point, parts in zip(self.points[1:], self.parts, strict=False):
            for part in parts:
                yield self._end(self.solver, point, point.x + _NUDGE * part)

    def _with_other_sigmas(self) -> Iterator[torch.Tensor]:
        """Ends after a nudge of each noise level but the first."""
        for point in self.points[1:]:
            sigmas = list(self.solver.sigmas)
            sigmas[point.index] += _NUDGE
            yield self._end(self.solver.model_copy(update={"sigmas": tuple(sigmas)}), point, point.x)

    def _end(self, solver: FittedSolver, point: Trajectory, x: torch.Tensor) -> torch.Tensor:
        """Latents where a solver ends from x, with the predictions before a point."""
        by = Fitted(solver)
        by.history = point.solver.history
        return _continued(self.generator, self.examples, Trajectory(x, by, point.index), len(solver.sigmas)).x


def passes(steps: int) -> int:
    """Model passes for each example when a solver of `steps` steps is fitted; fewer if refining stops early."""
    derivatives = sum((step + 2) * (steps - step) for step in range(1, steps))
    return steps + ROUNDS * (derivatives + steps)


def _continued(generator: Generator, examples: Examples, start: Trajectory, until: int) -> Trajectory:
    """The examples' prompts, from a trajectory on."""
    return generator.generate(
        examples.texts,
        examples.seeds,
        steps=until,
        guidance=examples.made_by.guidance,
        start=start,
        until=until,
        decode=False,
    ).trajectory


def identity_solver(sigmas: Sequence[float]) -> FittedSolver:
    """A solver that evaluates the model at each of `sigmas` and leaves the latents unchanged; a fit starts from it."""
    rows = [(1.0, *[0.0] * (step + 1)) for step in range(len(sigmas))]
    return FittedSolver(sigmas=tuple(sigmas), step_coeffs=tuple(rows[:-1]), x0_coeffs=tuple(rows))


def _least_squares(parts: Sequence[torch.Tensor], target: torch.Tensor, damping: float = 0) -> tuple[float, ...]:
    """Weights of the parts whose sum is closest to the target over all elements, by normal equations in float64.

    Damping makes the weights smaller, as a share of each part's own mean square.
    """
    columns = torch.stack([part.flatten() for part in parts]).double()
    products = columns @ columns.T
    # Predictions of neighbouring steps may be almost equal. The ridge is too small to affect the weights otherwise.
    ridge = 1e-9 * products.diagonal().mean() + damping * products.diagonal()
    weights: list[float] = torch.linalg.solve(products + ridge.diag(), columns @ target.flatten().double()).tolist()
    return tuple(weights)
