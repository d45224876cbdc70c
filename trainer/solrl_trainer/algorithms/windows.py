"""Windows of a sampler's steps that are stochastic; the others follow the ODE, and nothing is trained on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import StochasticSteps

if TYPE_CHECKING:
    from solrl_core.sampling.sde import StochasticSolver, Windowed

WindowOrder = Literal["random", "progressive"]
"""random: a place drawn for each iteration. progressive: from the first step to the last, and again."""


@dataclass(frozen=True)
class Window:
    """Position of the stochastic steps, by iteration. The last step, to σ = 0, is never one of them.

    Attributes:
        size: number of steps; None for all.
        within: share of the steps, from the noisiest, in which the window lies.
        order: see `WindowOrder`.
        every: iterations at each place, if progressive.
    """

    size: int | None = None
    within: float = 1.0
    order: WindowOrder = "random"
    every: int = 1

    def first(self, steps: int, iteration: int, seed: int) -> int:
        """Index of the window's first step, for a sampler with this number of steps.

        Args:
            steps: steps of the sampler.
            iteration: iteration of the run.
            seed: seed of the run, for a random place.
        """
        if self.size is None:
            return 0
        places = max(1, min(int(self.within * steps), steps - 1) - self.size + 1)
        if self.order == "progressive":
            return iteration // self.every % places
        return expand_seeds(seed, f"window/{iteration}", 1)[0] % places

    def around(
        self, solver: StochasticSteps | StochasticSolver, steps: int, iteration: int, seed: int
    ) -> StochasticSteps | Windowed:
        """The solver whose steps in the window are those of `solver`; other arguments are those of `first`."""
        first = self.first(steps, iteration, seed)
        if isinstance(solver, StochasticSteps):
            return solver.model_copy(update={"first": first, "count": self.size})
        from solrl_core.sampling.sde import Windowed

        return Windowed(solver, first, self.size)
