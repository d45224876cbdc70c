"""Stochastic solvers against their papers' formulas, windows of them, and recording through the generator.

The ODE solvers are tested by their trajectories, in test_sampler.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.families.backbone import stack
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.noise import initial_noise, step_noise
from solrl_core.sampling.sampler import SOLVERS, Recorder, Trajectory, advance, make_solver, solve, unshifted_sigmas
from solrl_core.sampling.sde import Cps, DanceSde, FlowSde, StochasticSolver
from solrl_core.sampling.solvers import Euler, Solver
from solrl_proto.rollouts import SdeKind, StochasticSteps

SIGMAS = [1.0, 0.9, 0.6, 0.2, 0.0]
ETA = 0.7
X, V, NOISE = torch.randn(3, 4, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind(0)
NOISES = torch.randn(4, *X.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def flow_published(x: torch.Tensor, v: torch.Tensor, sigma: float, then: float) -> tuple[torch.Tensor, float]:
    """Mean and deviation of FlowGRPO's step (arXiv 2505.05470, and its code), term by term."""
    std = ETA * math.sqrt(sigma / (1 - (SIGMAS[1] if sigma == 1 else sigma)))
    dt = then - sigma
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, std * math.sqrt(-dt)


def dance_published(x: torch.Tensor, v: torch.Tensor, sigma: float, then: float) -> tuple[torch.Tensor, float]:
    """Mean and deviation of DanceGRPO's step (arXiv 2505.07818, and its code), term by term."""
    dt, clean = then - sigma, x - sigma * v
    score = -(x - (1 - sigma) * clean) / sigma**2
    return x + v * dt - 0.5 * ETA**2 * score * dt, ETA * math.sqrt(-dt)


def cps_published(x: torch.Tensor, v: torch.Tensor, sigma: float, then: float) -> tuple[torch.Tensor, float]:
    """Mean and deviation of a coefficients-preserving step (arXiv 2509.05952, and its code), term by term."""
    clean, predicted, deviation = x - sigma * v, x + (1 - sigma) * v, then * math.sin(ETA * math.pi / 2)
    return (1 - then) * clean + math.sqrt(then**2 - deviation**2) * predicted, deviation


PUBLISHED = [(FlowSde(ETA), flow_published), (DanceSde(ETA), dance_published), (Cps(ETA), cps_published)]
Published = Callable[[torch.Tensor, torch.Tensor, float, float], tuple[torch.Tensor, float]]


@pytest.mark.parametrize(("sigma", "then"), list(pairwise(SIGMAS)))
@pytest.mark.parametrize(("prototype", "published"), PUBLISHED)
def test_a_step_is_the_papers(prototype: StochasticSolver, published: Published, sigma: float, then: float) -> None:
    solver = prototype.copy()
    found, log_prob = solver.step(X, sigma, then, V, NOISE)
    mean, deviation = published(X, V, sigma, then)
    assert torch.allclose(found, mean + deviation * NOISE, atol=1e-12)
    if published is cps_published:  # without the deviation
        expected = -(found - mean).square()
    else:
        expected = torch.distributions.Normal(mean, deviation).log_prob(found)
    assert log_prob.shape == (4,)
    assert torch.allclose(log_prob, expected.flatten(1).mean(1), atol=1e-12)
    assert torch.equal(solver.log_prob(X, sigma, then, V, found), log_prob)
    assert torch.allclose(solver.clean, X - sigma * V if then > 0 else found, atol=1e-12)


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_only_coefficients_preserving_steps_leave_the_noise_of_their_level(eta: float) -> None:
    # Clean latents 0 and the true velocity: x is noise alone, of deviation σ.
    noise, fresh = torch.randn(2, 40_000, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, _ = Cps(eta).step(0.9 * noise, 0.9, 0.5, noise, fresh)
    assert float(found.std()) == pytest.approx(0.5, rel=0.01)
    others = [solver.step(0.9 * noise, 0.9, 0.5, noise, fresh)[0].std() for solver in (FlowSde(eta), DanceSde(eta))]
    assert all(float(other) > 0.51 for other in others)


def test_log_probabilities_take_levels_and_their_gradient_raises_them() -> None:
    solver, states = FlowSde(ETA), X + 1
    now, then = torch.tensor(SIGMAS[:-1]).double(), torch.tensor(SIGMAS[1:]).double()
    rows = [solver.log_prob(X[i : i + 1], SIGMAS[i], SIGMAS[i + 1], V[i : i + 1], states[i : i + 1]) for i in range(4)]
    assert torch.allclose(solver.log_prob(X, now, then, V, states), torch.cat(rows), atol=1e-12)
    velocity = V.clone().requires_grad_()
    found, _ = FlowSde(ETA).step(X, 0.6, 0.2, V, NOISE)
    before = FlowSde(ETA).log_prob(X, 0.6, 0.2, velocity, found)
    before.sum().backward()
    after = FlowSde(ETA).log_prob(X, 0.6, 0.2, V + 0.1 * velocity.grad, found)
    assert bool((after > before).all())


@pytest.mark.parametrize("solver", [FlowSde(0.3), DanceSde(0.5), DanceSde(0.8).windowed(100, 200)])
def test_stochastic_steps_keep_the_marginals_of_the_ode(solver: StochasticSolver) -> None:
    # Clean latents of one Gaussian with mean m and deviation s: at σ the deviation is √((1 − σ)²·s² + σ²).
    m, s, count, sigmas = 0.4, 0.5, 40_000, unshifted_sigmas(400)
    generator = torch.Generator().manual_seed(1)

    def draw(index: int) -> torch.Tensor:
        return torch.randn(count, 1, generator=generator, dtype=torch.float64)

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        gain = (sigma - (1 - sigma) * s * s) / ((1 - sigma) ** 2 * s**2 + sigma**2)
        return gain * (x - (1 - sigma) * m) - m

    noise = draw(0)
    ode = advance(velocity, Trajectory(noise, Euler()), sigmas, until=380).x
    sde = advance(velocity, Trajectory(noise, solver), sigmas, until=380, noise=draw).x
    assert float((sde - ode).abs().mean()) > 0.05
    for x in (ode, sde):
        assert float(x.std()) == pytest.approx(math.hypot(0.95 * s, 0.05), rel=0.02)
        assert float(x.mean()) == pytest.approx(0.95 * m, abs=0.01)


def test_noise_is_drawn_for_noisy_steps_alone_which_need_it() -> None:
    with pytest.raises(ValueError, match="got no noise"):
        solve(lambda x, sigma: x, torch.zeros(1, 2), SIGMAS, FlowSde(ETA))
    for name in SOLVERS:
        plain, noisy = (make_solver(name).step(X, 0.6, 0.2, V, noise) for noise in (None, NOISE))
        assert plain[1] is noisy[1] is None
        assert torch.equal(plain[0], noisy[0])
    drawn: list[int] = []

    def draw(index: int) -> torch.Tensor:
        drawn.append(index)
        return NOISE

    start = Trajectory(X, FlowSde(ETA).windowed(1, 2))
    advance(lambda x, sigma: V, start, SIGMAS, noise=draw)
    assert drawn == [1, 2]
    with pytest.raises(ValueError, match="got no noise"):
        advance(lambda x, sigma: V, start, SIGMAS)


@pytest.fixture(scope="module")
def generator(backbone: Backbone) -> Generator:
    return Generator(backbone, "bf16")


TEXTS = ["a red circle", "two blue squares", "a green cross"]
SEEDS = [3, 14, 159]


def test_recorded_steps_can_be_evaluated_again(generator: Generator) -> None:
    backbone = generator.backbone
    made = generator.generate(TEXTS, SEEDS, steps=3, solver=FlowSde(ETA), record=True)
    recording = made.recording
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
    assert rest.recording.sigmas == tuple(generator.backbone.sigmas(3)[2:])


@pytest.mark.parametrize("inner", [DanceSde(ETA), Cps(ETA)])
def test_outside_its_window_a_solver_takes_eulers_steps(inner: StochasticSolver) -> None:
    solver, inner, euler, x = inner.windowed(1, 2), inner.copy(), Euler(), X
    for index, (sigma, then) in enumerate(pairwise(SIGMAS)):
        noisy = solver.noisy(index, then)
        assert noisy == (index in (1, 2))
        found, log_prob = solver.step(x, sigma, then, V, NOISE if noisy else None)
        expected, expected_log_prob = (inner if index in (1, 2) else euler).step(x, sigma, then, V, NOISE)
        assert torch.equal(found, expected)
        assert (log_prob is None) == (expected_log_prob is None) == (index not in (1, 2))
        assert torch.equal(solver.log_prob(x, sigma, then, V, found), inner.log_prob(x, sigma, then, V, found))
        assert torch.equal(solver.clean, found if then == 0 else x - sigma * V)
        x = found


@pytest.mark.parametrize(("kind", "inner"), [("flow", FlowSde(ETA)), ("dance", DanceSde(ETA)), ("cps", Cps(ETA))])
def test_named_steps_are_those_of_a_window(kind: SdeKind, inner: StochasticSolver) -> None:
    def run(solver: Solver, until: int, start: torch.Tensor = X, index: int = 0) -> Trajectory:
        return advance(
            lambda x, sigma: torch.sin(x),
            Trajectory(start, solver, index),
            SIGMAS,
            until=until,
            noise=NOISES.__getitem__,
        )

    named = make_solver(StochasticSteps(kind=kind, eta=ETA, first=1, count=2))
    whole = run(named, 4)
    assert torch.equal(whole.x, run(inner.windowed(1, 2), 4).x)
    assert not torch.equal(whole.x, run(inner.windowed(0, 2), 4).x)
    # A new solver continues in the same window: that depends on the trajectory alone.
    for index in range(1, 4):
        halfway = run(named, index)
        assert torch.equal(run(named.copy(), 4, halfway.x, index).x, whole.x)


@pytest.mark.parametrize(("first", "size", "stochastic"), [(0, None, [0, 1, 2]), (2, 5, [2]), (0, 1, [0]), (3, 1, [])])
def test_the_last_step_is_never_stochastic(first: int, size: int | None, stochastic: list[int]) -> None:
    solver, recorder = FlowSde(ETA).windowed(first, size), Recorder(Trajectory(X, Euler()))
    found = []
    for index, (sigma, then) in enumerate(pairwise(SIGMAS)):
        x, log_prob = solver.step(X, sigma, then, V, NOISE if solver.noisy(index, then) else None)
        recorder.add(x, log_prob)
        found.append(log_prob is not None)
    assert [index for index, noisy in enumerate(found) if noisy] == stochastic
    recording = recorder.recording(SIGMAS, slice(1, 3))
    steps = stochastic or range(4)
    assert recording.sigmas == tuple(SIGMAS[steps[0] : steps[-1] + 2])
    assert recording.states.shape == (len(steps) + 1, 2, *X.shape[1:])
    assert (recording.log_probs is None) == (not stochastic)


@pytest.mark.parametrize("solver", SOLVERS)
def test_recording_an_ode_changes_nothing_and_has_no_log_probabilities(generator: Generator, solver: str) -> None:
    plain = generator.generate(TEXTS, SEEDS, steps=4, solver=solver, decode=False)
    recorded = generator.generate(TEXTS, SEEDS, steps=4, solver=solver, decode=False, record=True)
    assert plain.recording is None
    assert recorded.recording.log_probs is None
    assert len(recorded.recording.states) == 5
    assert torch.equal(recorded.latents, plain.latents)


@pytest.mark.gpu
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
