"""The Euler solver against equations whose solutions are known."""

import math
from itertools import pairwise

import pytest
import torch
from solrl_core.sampling.sampler import Trajectory, advance, solve, unshifted_sigmas
from solrl_core.sampling.solver_specs import make_solver


def test_sigmas_are_evenly_spaced_from_one_to_zero() -> None:
    assert unshifted_sigmas(1) == [1.0, 0.0]
    assert unshifted_sigmas(4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    sigmas = unshifted_sigmas(10)
    assert sigmas == pytest.approx([1 - i / 10 for i in range(11)], abs=1e-15)
    assert all(isinstance(sigma, float) for sigma in sigmas)


def test_euler_on_a_linear_equation_gives_its_own_product() -> None:
    # dx/dσ = a·x: each step multiplies by 1 + a·(σ' − σ), on sigmas that are not even.
    sigmas, rates = [1.0, 0.6, 0.5, 0.05, 0.0], torch.tensor([[-1.0], [0.5], [2.0]], dtype=torch.float64)
    found = solve(lambda x, sigma: rates * x, torch.ones(3, 1, dtype=torch.float64), sigmas)
    expected = [[math.prod(1 + a * (b - c) for c, b in pairwise(sigmas))] for a in (-1.0, 0.5, 2.0)]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_between_comes_before_each_step_and_can_stop() -> None:
    events: list[str] = []

    class Left(Exception):  # noqa: N818
        pass

    def between() -> None:
        events.append("between")
        if events.count("between") == 3:
            raise Left

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        events.append("step")
        return x

    with pytest.raises(Left):
        solve(velocity, torch.zeros(1), unshifted_sigmas(6), between=between)
    assert events == ["between", "step", "between", "step", "between"]


@pytest.mark.parametrize("sigmas", [[], [1.0]])
def test_too_few_sigmas_are_refused(sigmas: list[float]) -> None:
    with pytest.raises(ValueError, match=f"{len(sigmas)} sigmas"):
        solve(lambda x, sigma: x, torch.zeros(1), sigmas)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_a_trajectory_in_parts_is_the_whole_one(solver: str) -> None:
    noise = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    sigmas = unshifted_sigmas(6)

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return torch.sin(3 * x) * (1 + sigma)

    start = Trajectory(noise, make_solver(solver))
    whole = advance(velocity, start, sigmas)
    halfway = advance(velocity, start, sigmas, until=3)
    assert (halfway.index, whole.index) == (3, 6)
    # The predicted clean latents lie on the straight line that the last velocity points along.
    assert not torch.allclose(halfway.clean, halfway.x)
    assert torch.allclose(whole.clean, whole.x)
    parts = [advance(velocity, halfway.rows(rows), sigmas) for rows in ([3, 1], slice(4, 5))]
    assert torch.equal(Trajectory.join(parts).x, whole.x[[3, 1, 4]])
    with pytest.raises(ValueError, match="got until=2; expected 3 to 6 steps"):
        advance(velocity, halfway, sigmas, until=2)
