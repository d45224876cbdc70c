"""The ODE solvers against known solutions, and dpm2 against DPM-Solver++(2M) as published and as in diffusers."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from solrl_core.sampling.sampler import SOLVERS, SolverSpec, Trajectory, advance, make_solver, solve, unshifted_sigmas
from solrl_proto.rollouts import FittedSolver


def test_sigmas_are_even_and_euler_on_a_linear_equation_gives_its_own_product() -> None:
    assert unshifted_sigmas(1) == [1.0, 0.0]
    assert unshifted_sigmas(4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    sigmas = unshifted_sigmas(10)
    assert sigmas == pytest.approx([1 - i / 10 for i in range(11)], abs=1e-15)
    assert all(isinstance(sigma, float) for sigma in sigmas)
    # dx/dσ = a·x: each step multiplies by 1 + a·(σ' − σ), on sigmas that are not even.
    sigmas, rates = [1.0, 0.6, 0.5, 0.05, 0.0], torch.tensor([[-1.0], [0.5], [2.0]], dtype=torch.float64)
    found = solve(lambda x, sigma: rates * x, torch.ones(3, 1, dtype=torch.float64), sigmas)
    expected = [[math.prod(1 + a * (b - c) for c, b in pairwise(sigmas))] for a in (-1.0, 0.5, 2.0)]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("sigmas", [[], [1.0]])
def test_too_few_sigmas_are_refused(sigmas: list[float]) -> None:
    with pytest.raises(ValueError, match=f"{len(sigmas)} sigmas"):
        solve(lambda x, sigma: x, torch.zeros(1), sigmas)


ROWS = [tuple(torch.randn(step + 2, generator=torch.Generator().manual_seed(step)).tolist()) for step in range(4)]
HALVES = tuple(tuple(weight / 2 for weight in row) for row in ROWS[:-1])
FITTED = FittedSolver(sigmas=(1.0, 0.85, 0.65, 0.3), step_coeffs=HALVES, x0_coeffs=tuple(ROWS))


@pytest.mark.parametrize("solver", ["euler", "dpm2", FITTED], ids=["euler", "dpm2", "fitted"])
def test_a_trajectory_in_parts_is_the_whole_one(solver: SolverSpec) -> None:
    noise = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return torch.sin(3 * x) * (1 + sigma)

    start = Trajectory(noise, make_solver(solver))
    sigmas = start.solver.schedule(6, unshifted_sigmas)
    whole = advance(velocity, start, sigmas)
    halfway = advance(velocity, start, sigmas, until=3)
    assert (start.clean, halfway.index, whole.index) == (None, 3, len(sigmas) - 1)
    # The predicted clean latents lie on the straight line that the last velocity points along.
    assert not torch.allclose(halfway.clean, halfway.x)
    assert torch.allclose(whole.clean, whole.x)
    parts = [advance(velocity, halfway.rows(rows), sigmas) for rows in ([3, 1], slice(4, 5))]
    joined = Trajectory.join(parts).to(torch.device("cpu"))
    assert torch.equal(joined.x, whole.x[[3, 1, 4]])
    assert torch.equal(joined.clean, whole.clean[[3, 1, 4]])
    with pytest.raises(ValueError, match="got until=2; expected 3 to"):
        advance(velocity, halfway, sigmas, until=2)


UNEVEN = [1.0, 0.93, 0.81, 0.62, 0.33, 0.02, 0.0]
SCHEDULES = [UNEVEN, UNEVEN[1:], unshifted_sigmas(10), unshifted_sigmas(3), unshifted_sigmas(2), [1.0, 0.0]]
NOISE = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """Nonlinear in latents and sigma, so that every term of a solver shows."""
    return torch.tanh(1.3 * x + sigma) - 0.4 * x * sigma**2 + math.sin(5 * sigma)


def published(noise: np.ndarray, sigmas: list[float]) -> np.ndarray:
    """Lu et al., arXiv 2211.01095, algorithm 2 in its own terms, with alpha_t = 1 − sigma_t; ends of first order."""
    alphas = 1 - np.array(sigmas)
    with np.errstate(divide="ignore"):
        lambdas = np.log(alphas) - np.log(sigmas)
    x, q = noise, []
    for i in range(1, len(sigmas)):
        q.append(x - sigmas[i - 1] * velocity(torch.from_numpy(x), sigmas[i - 1]).numpy())
        h = lambdas[i] - lambdas[i - 1]
        d = q[-1]
        if 1 < i < len(sigmas) - 1:
            r0 = (lambdas[i - 1] - lambdas[i - 2]) / h
            d = (1 + 1 / (2 * r0)) * q[-1] - 1 / (2 * r0) * q[-2]
        x = sigmas[i] / sigmas[i - 1] * x - alphas[i] * np.expm1(-h) * d
    return x


@pytest.mark.parametrize("sigmas", SCHEDULES)
def test_dpm2_equals_the_published_algorithm_and_diffusers_scheduler(sigmas: list[float]) -> None:
    found = solve(velocity, NOISE, sigmas, "dpm2")
    assert np.abs(found.numpy() - published(NOISE.numpy(), sigmas)).max() <= 1e-12
    if len(sigmas) > 4:
        assert float((found - solve(velocity, NOISE, sigmas, "euler")).abs().max()) > 1e-3
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=2, final_sigmas_type="zero"
    )
    scheduler.set_timesteps(len(sigmas) - 1)
    # The schedule that it makes itself begins a little below 1, so ours is put in its place.
    scheduler.sigmas = torch.tensor(sigmas, dtype=torch.float64)
    x = NOISE
    for t, sigma in zip(scheduler.timesteps, sigmas[:-1], strict=True):
        x = scheduler.step(velocity(x, sigma), t, x).prev_sample.double()
    # A step of theirs is computed in float32.
    assert float((found - x).abs().max()) <= 1e-5


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_velocity_is_evaluated_once_per_step(solver: str) -> None:
    asked: list[float] = []

    def counted(x: torch.Tensor, sigma: float) -> torch.Tensor:
        asked.append(sigma)
        return velocity(x, sigma)

    noise = NOISE.clone()
    found = solve(counted, noise, UNEVEN, solver)
    assert asked == UNEVEN[:-1]
    assert torch.equal(noise, NOISE)
    assert torch.equal(solve(velocity, NOISE, UNEVEN, solver), found), "a solver keeps nothing from a run before"
    single = solve(velocity, NOISE.float(), UNEVEN, solver)
    assert single.dtype == torch.float32
    assert float((single - found).abs().max()) < 1e-5
