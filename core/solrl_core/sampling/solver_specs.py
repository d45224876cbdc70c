"""Specifications of solvers, as plans contain them, and the solvers that they specify."""

from collections.abc import Callable, Mapping

from solrl_proto.rollouts import FittedSolver, StochasticSteps

from solrl_core.sampling.sde import SDES
from solrl_core.sampling.solvers import Dpm2, Euler, Fitted, Solver

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
