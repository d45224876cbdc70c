"""Solver objects: FlowGRPO's stochastic step against its published formulas, and recording through the generator.

The ODE solvers are tested by their trajectories, in test_sampler and test_sampler_dpm2.
"""

import math
from itertools import pairwise

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.families.base import stack
from solrl_core.generator import Generator
from solrl_core.noise import initial_noise, step_noise
from solrl_core.sampler import Trajectory, advance, solve, unshifted_sigmas
from solrl_core.solvers import SOLVERS, FlowSde, make_solver

SIGMAS = [1.0, 0.9, 0.6, 0.2, 0.0]
ETA = 0.7
X, V, NOISE = torch.randn(3, 4, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind(0)


def published(x: torch.Tensor, v: torch.Tensor, sigma: float, then: float) -> tuple[torch.Tensor, float]:
    """Mean and deviation of FlowGRPO's step (arXiv 2505.05470, and its code), term by term."""
    std = ETA * math.sqrt(sigma / (1 - (SIGMAS[1] if sigma == 1 else sigma)))
    dt = then - sigma
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, std * math.sqrt(-dt)


@pytest.mark.parametrize(("sigma", "then"), list(pairwise(SIGMAS)))
def test_a_stochastic_step_is_flowgrpos(sigma: float, then: float) -> None:
    solver = FlowSde(ETA)
    found, log_prob = solver.step(X, sigma, then, V, NOISE)
    mean, deviation = published(X, V, sigma, then)
    assert torch.allclose(found, mean + deviation * NOISE, atol=1e-12)
    expected = torch.distributions.Normal(mean, deviation).log_prob(found).flatten(1).mean(1)
    assert log_prob.shape == (4,)
    assert torch.allclose(log_prob, expected, atol=1e-12)
    assert torch.equal(solver.log_prob(X, sigma, then, V, found), log_prob)
    assert solver.clean is not None
    assert torch.allclose(solver.clean, X - sigma * V if then > 0 else found, atol=1e-12)


def test_log_probabilities_take_a_level_for_each_row() -> None:
    solver, states = FlowSde(ETA), X + 1
    now, then = torch.tensor(SIGMAS[:-1]).double(), torch.tensor(SIGMAS[1:]).double()
    rows = [solver.log_prob(X[i : i + 1], SIGMAS[i], SIGMAS[i + 1], V[i : i + 1], states[i : i + 1]) for i in range(4)]
    assert torch.allclose(solver.log_prob(X, now, then, V, states), torch.cat(rows), atol=1e-12)


def test_the_gradient_raises_the_probability_of_a_recorded_step() -> None:
    velocity = V.clone().requires_grad_()
    found, _ = FlowSde(ETA).step(X, 0.6, 0.2, V, NOISE)
    before = FlowSde(ETA).log_prob(X, 0.6, 0.2, velocity, found)
    before.sum().backward()
    assert velocity.grad is not None
    after = FlowSde(ETA).log_prob(X, 0.6, 0.2, V + 0.1 * velocity.grad, found)
    assert bool((after > before).all())


def test_stochastic_steps_keep_the_marginals_of_the_ode() -> None:
    # Clean latents of one Gaussian with deviation s: at σ the deviation is √((1 − σ)²·s² + σ²).
    s, count = 0.5, 40_000
    generator = torch.Generator().manual_seed(1)

    def draw(index: int) -> torch.Tensor:
        return torch.randn(count, 1, generator=generator, dtype=torch.float64)

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return x * (sigma - (1 - sigma) * s * s) / ((1 - sigma) ** 2 * s**2 + sigma**2)

    start = Trajectory(draw(0), FlowSde(0.3))
    end = advance(velocity, start, unshifted_sigmas(400), until=380, noise=draw)
    assert float(end.x.std()) == pytest.approx(math.hypot(0.95 * s, 0.05), rel=0.02)


def test_a_stochastic_step_needs_noise_and_an_ode_ignores_it() -> None:
    with pytest.raises(ValueError, match="got no noise"):
        solve(lambda x, sigma: x, torch.zeros(1, 2), SIGMAS, FlowSde())
    for name in SOLVERS:
        plain, noisy = (make_solver(name).step(X, 0.6, 0.2, V, noise) for noise in (None, NOISE))
        assert plain[1] is noisy[1] is None
        assert torch.equal(plain[0], noisy[0])


def test_a_solver_is_made_for_each_trajectory() -> None:
    prototype = FlowSde()
    assert make_solver(prototype) is not prototype
    start = Trajectory(X, prototype)
    advance(lambda x, sigma: V, start, SIGMAS, noise=lambda step: NOISE)
    assert prototype.clean is None


@pytest.fixture(scope="module")
def generator(backbone: Backbone) -> Generator:
    return Generator(backbone, "bf16")


TEXTS = ["a red circle", "two blue squares", "a green cross"]
SEEDS = [3, 14, 159]


def test_recorded_steps_can_be_evaluated_again(generator: Generator) -> None:
    backbone = generator.backbone
    made = generator.generate(TEXTS, SEEDS, steps=3, solver=FlowSde(ETA), record=True)
    recording = made.recording
    assert recording is not None
    assert recording.log_probs is not None
    assert recording.sigmas == tuple(backbone.sigmas(3))
    assert recording.states.shape == (4, 3, *backbone.latent_shape)
    assert recording.states.dtype == recording.log_probs.dtype == torch.float32
    assert recording.log_probs.shape == (3, 3)
    assert torch.equal(recording.states[0], initial_noise(SEEDS, backbone.latent_shape))
    assert torch.equal(recording.states[-1], made.latents)
    assert not recording.states.is_inference()  # they can be trained on
    rows = stack([backbone.conditioning(text) for text in TEXTS])
    for step, (now, then) in enumerate(pairwise(recording.sigmas)):
        x, x_next = recording.states[step], recording.states[step + 1]
        with torch.no_grad():
            velocity = backbone.velocity(generator.transformer, x, torch.full((3,), now), rows)
        again = FlowSde(ETA).log_prob(x, now, then, velocity, x_next)
        assert torch.allclose(again, recording.log_probs[step], atol=1e-3)
        taken, _ = FlowSde(ETA).step(x, now, then, velocity, step_noise(SEEDS, step, backbone.latent_shape))
        assert torch.allclose(x_next, taken, atol=1e-3)


def test_a_stochastic_candidate_does_not_depend_on_its_batch(generator: Generator) -> None:
    together = generator.generate(TEXTS[0], SEEDS, steps=3, solver=FlowSde(ETA), decode=False)
    alone = generator.generate(TEXTS[0], SEEDS[1:2], steps=3, solver=FlowSde(ETA), decode=False)
    assert float((together.latents[1] - alone.latents[0]).abs().max()) < 1e-3
    half = generator.generate(TEXTS[0], SEEDS, steps=3, solver=FlowSde(ETA), until=2, decode=False)
    rest = generator.generate(TEXTS[0], [SEEDS[1]], steps=3, start=half.trajectory.rows([1]), decode=False, record=True)
    assert float((together.latents[1] - rest.latents[0]).abs().max()) < 1e-3
    assert rest.recording is not None
    assert rest.recording.sigmas == tuple(generator.backbone.sigmas(3)[2:])


@pytest.mark.parametrize("solver", SOLVERS)
def test_recording_an_ode_changes_nothing_and_has_no_log_probabilities(generator: Generator, solver: str) -> None:
    plain = generator.generate(TEXTS, SEEDS, steps=4, solver=solver, decode=False)
    recorded = generator.generate(TEXTS, SEEDS, steps=4, solver=solver, decode=False, record=True)
    assert plain.recording is None
    assert recorded.recording is not None
    assert recorded.recording.log_probs is None
    assert len(recorded.recording.states) == 5
    assert torch.equal(recorded.latents, plain.latents)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stochastic_step_on_a_gpu_is_the_cpu_s() -> None:
    x, v, noise = (tensor.float() for tensor in (X, V, NOISE))
    there = [tensor.cuda() for tensor in (x, v, noise)]
    found, log_prob = FlowSde(ETA).step(there[0], 0.6, 0.2, there[1], there[2])
    expected, expected_log_prob = FlowSde(ETA).step(x, 0.6, 0.2, v, noise)
    assert torch.allclose(found.cpu(), expected, atol=1e-5)
    assert torch.allclose(log_prob.cpu(), expected_log_prob, atol=1e-5)
    levels = torch.full((4,), 0.6, dtype=torch.float64), torch.full((4,), 0.2, dtype=torch.float64)
    for now, then in (levels, (levels[0].cuda(), levels[1].cuda())):
        again = FlowSde(ETA).log_prob(there[0], now, then, there[1], found)
        assert torch.allclose(again, log_prob, atol=1e-5)
