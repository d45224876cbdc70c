"""Fitted solvers, compared with known solvers and with many Euler steps of the model."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.sampling.fitting import SCHEDULES, Examples, fit, identity_solver, make_examples, passes
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.sampler import SOLVERS, Trajectory, advance, make_solver, solve, unshifted_sigmas
from solrl_core.sampling.solvers import Fitted
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import FittedSolver

TEXTS = ("a red circle", "two blue squares", "a green cross to the left of a yellow triangle", "a large purple square")
FEW = 4


def euler_as_fitted(sigmas: list[float]) -> FittedSolver:
    """Euler's weights: x' = (σ'/σ)·x + (1 − σ'/σ)·c_n, where c_n is foreseen."""
    step_coeffs, x0_coeffs = [], []
    for step, (now, then) in enumerate(pairwise(sigmas)):
        earlier = [0.0] * step
        step_coeffs.append((then / now, *earlier, 1 - then / now))
        x0_coeffs.append((0.0, *earlier, 1.0))
    return FittedSolver(sigmas=tuple(sigmas[:-1]), step_coeffs=tuple(step_coeffs[:-1]), x0_coeffs=tuple(x0_coeffs))


def curved(x: torch.Tensor, sigma: float) -> torch.Tensor:
    return torch.sin(3 * x) * (1 + sigma)


def test_eulers_weights_give_euler() -> None:
    sigmas = unshifted_sigmas(5)
    noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fitted = euler_as_fitted(sigmas)
    assert Fitted(fitted).schedule(5, lambda steps: []) == sigmas
    assert torch.allclose(solve(curved, noise, sigmas, fitted), solve(curved, noise, sigmas), atol=1e-12)
    halfway, known = (advance(curved, Trajectory(noise, make_solver(by)), sigmas, until=3) for by in (fitted, "euler"))
    assert torch.allclose(halfway.clean, known.clean, atol=1e-12)


@pytest.fixture(scope="module")
def generator(backbone: Backbone) -> Generator:
    return Generator(backbone, "bf16")


@pytest.fixture(scope="module")
def examples(generator: Generator) -> Examples:
    texts = [text for text in TEXTS for _ in range(4)]
    return make_examples(generator, texts, expand_seeds(1, "fit", 16), steps=10, solver="euler", guidance=1.0)


def test_fits_at_eulers_levels_give_eulers_result(generator: Generator, examples: Examples) -> None:
    made = generator.generate(examples.texts, examples.seeds, steps=10, decode=False)
    assert len(made.images) == 0
    assert torch.allclose(examples.latents[-1], made.latents, atol=1e-5)
    assert torch.equal(examples.at(1.0), examples.latents[0])
    assert torch.allclose(examples.at(0.0), made.latents, atol=1e-5)
    between = (examples.latents[2] + examples.latents[3]) / 2
    assert torch.allclose(examples.at((examples.sigmas[2] + examples.sigmas[3]) / 2), between, atol=1e-5)
    solver = fit(generator, examples, examples.sigmas[:-1], rounds=0)
    made = generator.generate(examples.texts, examples.seeds, steps=10, solver=solver, decode=False)
    error = (made.latents - examples.latents[-1]).square().mean() / examples.latents[-1].square().mean()
    assert float(error) < 1e-4


def test_four_fitted_steps_are_closer_to_ten_euler_steps_than_six(generator: Generator, examples: Examples) -> None:
    solver = fit(generator, examples, SCHEDULES[1])
    # Others than it was fitted on: other prompts, other seeds.
    texts, seeds = ["three cyan triangles", "a blue circle above a red cross"] * 8, expand_seeds(2, "held out", 16)
    true = generator.generate(texts, seeds, steps=10, decode=False).latents

    def error(steps: int, by: str | FittedSolver) -> float:
        made = generator.generate(texts, seeds, steps=steps, solver=by, decode=False).latents
        return float((made - true).square().mean())

    fitted = error(FEW, solver)
    assert fitted < error(6, "euler")
    assert all(fitted < 0.5 * error(FEW, by) for by in SOLVERS)


def test_refining_ends_nearer_to_the_examples(generator: Generator, examples: Examples) -> None:
    def error(rounds: int) -> float:
        solver = fit(generator, examples, SCHEDULES[1], rounds)
        made = generator.generate(examples.texts, examples.seeds, steps=FEW, solver=solver, decode=False)
        return float((made.latents - examples.latents[-1]).square().mean())

    assert error(1) < 0.9 * error(0)


def test_a_fit_takes_the_passes_that_a_calibration_expects(generator: Generator, examples: Examples) -> None:
    few = replace(
        examples, texts=examples.texts[:8], seeds=examples.seeds[:8], latents=[x[:8] for x in examples.latents]
    )
    rows = []
    velocity = generator.backbone.velocity
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator.backbone, "velocity", lambda *args: rows.append(len(args[1])) or velocity(*args))
        refined = fit(generator, few, SCHEDULES[1])
        first = sum(rows)
        rows.clear()
        greedy = fit(generator, few, SCHEDULES[1], rounds=0)
    assert first == passes(FEW) * 8
    assert sum(rows) == FEW * 8
    assert greedy.sigmas == SCHEDULES[1] != refined.sigmas


def test_the_identity_solver_only_evaluates_the_model() -> None:
    noise, asked = torch.ones(2, 3), []

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        asked.append(sigma)
        return x + sigma

    still = Fitted(identity_solver(SCHEDULES[0]))
    end = advance(velocity, Trajectory(noise, still), still.schedule(FEW, unshifted_sigmas))
    assert asked == list(SCHEDULES[0])
    assert torch.equal(end.x, noise)
    assert [float(p[0, 0]) for p in end.solver.predictions] == pytest.approx([1 - s * (1 + s) for s in SCHEDULES[0]])
