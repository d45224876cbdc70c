"""FlowGRPO and DanceGRPO: first gradients, clipping, divergence, advantages, and windows of stochastic steps."""

from dataclasses import replace

import pytest
import torch
from run_folders import iteration_record
from solrl_core.families import Backbone
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.sde import Cps, DanceSde, FlowSde, StochasticSolver
from solrl_engine.sampler import Sampler
from solrl_proto.rollouts import Plan, PromptItem
from solrl_trainer.algorithms.algorithm import Velocities
from solrl_trainer.algorithms.dancegrpo import DanceGrpo, DanceGrpoSettings
from solrl_trainer.algorithms.flowgrpo import FlowGrpo, FlowGrpoSettings
from solrl_trainer.algorithms.grpo import clipped_objective, kl_divergence, masked_objective
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.algorithms.training_data import RecordedTrajectory, TrainingSamples, TrajectoryBatch, Window
from solrl_trainer.policy.update import UpdateFigures
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError, resolve
from training_helpers import TINY, make_policy, updater

STEPS = 4
ADVANTAGES = [1.0, -1.0, 0.5, -2.0]
PROMPT = PromptItem(id="p", text="a red circle")
NAMES = ["flowgrpo", "dancegrpo"]
FAST = ("flowgrpo_fast", "flow", "clip")


def configured(recipe: str, *overrides: str) -> RunConfig:
    fixed = ("optimizer.updates=1", "optimizer.max_grad_norm=1e9", "algorithm.timestep_fraction=1")
    return resolve(f"mini-sana/{recipe}/clipscore", overrides=[*TINY, *fixed, *overrides]).config


def recorded(backbone: Backbone, config: RunConfig) -> TrainingSamples:
    """Four seeds of one prompt under the base, with their steps."""
    data = ALGORITHMS.find(config.algorithm.name)(config.algorithm).trains_on
    generator = Generator(backbone, "bf16")
    sampler = Sampler(generator, lambda: Plan(steps=STEPS), lambda: data.solver("euler", STEPS, 0, 42), data.recorded)
    found = sampler.sample([PROMPT] * 4, [3, 1, 4, 15])
    conditioning, prompts = backbone.conditioning(PROMPT.text), torch.zeros(4, dtype=torch.long)
    return TrainingSamples(found.latents, torch.tensor(ADVANTAGES), conditioning, prompts, found.recording)


@pytest.mark.parametrize(
    ("recipe", "sde", "region"),
    [
        *[("flowgrpo", "flow", region) for region in ("clip", "guard", "dppo")],
        *[("flowgrpo", "cps", "clip"), ("dancegrpo", "dance", "clip"), FAST],
    ],
)
def test_the_first_policy_gradient(recipe: str, sde: str, region: str, backbone: Backbone, loaded: Backbone) -> None:
    settings = [f"algorithm.sde={sde}", *(["algorithm.kl_weight=0"] if "flow" in recipe else [])]
    config = configured(recipe, f"algorithm.trust_region={region}", *settings)
    samples = recorded(loaded, config)
    recording = samples.recording
    steps = 2 if recipe == "flowgrpo_fast" else STEPS - 1
    assert len(recording.log_probs) == steps
    policy, optimizer = make_policy(backbone, config)
    data = ALGORITHMS.find(config.algorithm.name)(config.algorithm).trains_on
    sigmas = torch.tensor(recording.sigmas, dtype=torch.float64)
    rows, at = torch.arange(4).repeat_interleave(steps), torch.arange(steps).repeat(4)
    batch: TrajectoryBatch = data.batch(samples, rows, at, sigmas, None, torch.device("cpu"))
    velocity = backbone.velocity(policy.transformer, batch.x.clone(), batch.t, samples.conditioning_of(rows))
    log_prob = batch.solver.log_prob(batch.x.clone(), batch.sigma, batch.sigma_next, velocity, batch.x_next.clone())
    # −∇ mean A·log π: the score function, without a ratio.
    gradient = torch.autograd.grad(-(log_prob * batch.advantages).mean(), policy.parameters)
    found = updater(policy, backbone, optimizer, config).update(samples, 0)
    assert found.figures["ratio"] == pytest.approx(1, abs=1e-6)
    assert found.figures["clipped"] == 0
    if region == "guard":  # which divides the loss of a step by its length
        assert found.grad_norm > 1e-3
        return
    assert found.figures["old_kl"] == pytest.approx(0, abs=1e-12)
    assert found.loss == pytest.approx(-sum(ADVANTAGES) / 4, abs=1e-5)
    norm = float(torch.stack([part.norm() for part in gradient]).norm())
    assert norm > 1e-3
    for parameter, part in zip(policy.parameters, gradient, strict=True):
        assert float((parameter.grad - part).norm()) <= 1e-3 * norm


@pytest.mark.parametrize("recompute", [True, False])
def test_a_ratio_is_to_the_behaviour_policy_or_recording(recompute: bool, backbone: Backbone, loaded: Backbone) -> None:
    """The samples are the base's, and the behaviour policy is another: only the recording knows that."""
    config = configured("flowgrpo", f"algorithm.recompute={recompute}")
    policy, optimizer = make_policy(backbone, config)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters:
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    policy.decay_old(0)
    figures = updater(policy, backbone, optimizer, config).update(recorded(loaded, config), 0).figures
    assert (figures["ratio"] == pytest.approx(1, abs=1e-6)) == recompute
    assert (figures["clipped"] == 0) == recompute
    assert any("gap" in name for name in figures) == recompute


def test_the_gap_to_the_recording_is_logged_by_noise_level(backbone: Backbone, loaded: Backbone) -> None:
    config = configured("flowgrpo", "optimizer.batch=3")
    samples = recorded(loaded, config)
    recording = samples.recording
    added = torch.tensor([[0.1], [-0.2], [0.4]]) * torch.tensor([1.0, 2, 3, 2])
    shifted = replace(recording, log_probs=recording.log_probs + added)
    policy, optimizer = make_policy(backbone, config)
    figures = updater(policy, backbone, optimizer, config).update(replace(samples, recording=shifted), 0).figures
    line = replace(iteration_record(0), update=UpdateFigures(0.0, 0.0, 0.0, figures)).line()
    levels = [f"{sigma:.4f}" for sigma in recording.sigmas[:-1]]
    assert line["objective/gap"] == pytest.approx(dict(zip(levels, (0.2, 0.4, 0.8), strict=True)), rel=1e-3)
    assert not any("@" in key for key in line)
    # A level without points has no gap.
    figures = {"gap@0.9000": 0.25, "@0.9000": 0.5, "gap@0.5000": 0.0, "@0.5000": 0.0, "ratio": 1.0}
    line = replace(iteration_record(0), update=UpdateFigures(0.0, 0.0, 0.0, figures)).line()
    assert (line["objective/gap"], line["objective/ratio"]) == ({"0.9000": 0.5}, 1.0)


def test_ratios_are_clipped_where_they_gain_and_beyond_the_threshold_only_come_back() -> None:
    change = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.05])).requires_grad_()
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 9.0])
    value, figures = clipped_objective(change, advantages.clamp(-5, 5), 0.1)
    assert float(value.detach()) == pytest.approx((-2 * 1.1 + 2 * 1.5 - 2 * 0.5 + 2 * 0.9 - 5 * 1.05) / 5)
    assert float(figures["clipped"]) == pytest.approx(4 / 5)
    value.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(change.grad * 5, torch.tensor([0.0, 3.0, -1.0, 0.0, -5.25]))
    # A step beyond the threshold may only come back.
    change = torch.tensor([0.1, -0.1, 0.1, -0.1, 0.1]).requires_grad_()
    advantages, kl = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1])
    value, figures = masked_objective(change, advantages, kl, 0.5)
    (gradient,) = torch.autograd.grad(value, change)
    ratio = change.detach().exp()
    assert torch.allclose(gradient * 5, -advantages * ratio * torch.tensor([0.0, 1, 1, 0, 1]))
    assert float(figures["clipped"]) == pytest.approx(2 / 5)
    assert float(figures["old_divergence"]) == pytest.approx(4.1 / 5)


def steps_of(solver: StochasticSolver) -> tuple[TrajectoryBatch, Velocities]:
    """Three recorded steps at different levels, and velocities of three policies at them."""
    x, old, current, reference, noise = torch.randn(5, 3, 2, 4, 4, generator=torch.Generator().manual_seed(2)).unbind(0)
    sigma = torch.tensor([1.0, 0.7, 0.4], dtype=torch.float64)
    then = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    mean, deviation = solver.gaussian(x, sigma, then, old)
    x_next = mean + deviation * noise
    log_prob = solver.log_prob(x, sigma, then, old, x_next)
    batch = TrajectoryBatch(x, sigma.float(), torch.tensor([1.0, -1.0, 0.3]), x_next, sigma, then, log_prob, solver)
    return batch, Velocities(current.requires_grad_(), {"old": old, "reference": reference})


def test_the_divergence_is_that_of_two_gaussians_or_of_preserving_steps() -> None:
    batch, velocity = steps_of(FlowSde(0.7))
    (mean, deviation), (other, _) = batch.gaussian_under(velocity.current), batch.gaussian_under(velocity.reference)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, deviation), normal(other, deviation)).flatten(1).mean(1)
    kl = kl_divergence(batch, velocity.current, velocity.reference)
    assert torch.allclose(kl, expected, rtol=1e-5)
    # The paper's: Δt/2 · (s·(1 − σ)/(2σ) + 1/s)² · |v − v_ref|².
    now, step = batch.sigma, batch.sigma - batch.sigma_next
    s = 0.7 * (now / (1 - torch.where(now == 1, batch.sigma_next, now))).sqrt()
    apart = (velocity.current - velocity.reference).square().flatten(1).mean(1)
    assert torch.allclose(kl.double(), step / 2 * (s * (1 - now) / (2 * now) + 1 / s) ** 2 * apart, rtol=1e-5)
    released = FlowGrpo(FlowGrpoSettings()).released_kl(batch, kl)
    assert torch.allclose(released.double(), kl.double() * step, rtol=1e-6)
    # Of coefficients-preserving steps, it is weighed as it is.
    batch, velocity = steps_of(Cps(0.8))
    parts = [FlowGrpo(FlowGrpoSettings(sde="cps", kl_weight=weight)).loss(batch, velocity) for weight in (0.0, 0.04)]
    kl = kl_divergence(batch, velocity.current, velocity.reference).detach().mean()
    assert float((parts[1].value - parts[0].value).detach()) == pytest.approx(0.04 * float(kl), rel=1e-4)


@pytest.mark.parametrize("recompute", [True, False])
def test_flowgrpo_adds_the_weighted_divergence(recompute: bool) -> None:
    batch, velocity = steps_of(FlowSde(0.7))
    parts = [
        FlowGrpo(FlowGrpoSettings(kl_weight=weight, clip_range=0.2, recompute=recompute)).loss(batch, velocity)
        for weight in (0.0, 0.04)
    ]
    kl = kl_divergence(batch, velocity.current, velocity.reference)
    expected = 0.04 * (kl.detach() * (batch.sigma - batch.sigma_next)).mean()
    assert float((parts[1].value - parts[0].value).detach()) == pytest.approx(float(expected), rel=1e-4)
    assert parts[0].figures.keys() == {"ratio", "clipped", "old_kl"}
    assert float(parts[1].figures["kl"]) == pytest.approx(float(kl.detach().mean()))
    change = (batch.log_prob_under(velocity.current) - batch.log_prob).detach()
    assert float(parts[0].figures["old_kl"]) == pytest.approx(float((change**2).mean() / 2), rel=1e-3)
    assert float(parts[0].figures["clipped"]) == float(((change.exp() - 1).abs() > 0.2).float().mean()) > 0


def test_the_guarded_ratio_is_the_noise_times_the_change_of_the_mean() -> None:
    """It is linear in the mean, so it does not drift below 1 as the square of the change does."""
    batch, velocity = steps_of(DanceSde(0.3))
    settings = DanceGrpoSettings(trust_region="guard", clip_range=0.9)
    (mean, deviation), (old, _) = batch.gaussian_under(velocity.current), batch.gaussian_under(velocity.old)
    noise = (batch.x_next - old) / deviation
    log_ratio = (noise * (mean - old)).flatten(1).mean(1).detach()
    figures = DanceGrpo(settings).loss(batch, velocity).figures
    assert float(figures["ratio"]) == pytest.approx(float(log_ratio.exp().mean()), rel=1e-4)
    plain = DanceGrpo(settings.model_copy(update={"trust_region": "clip"})).loss(batch, velocity).figures
    assert float(plain["ratio"]) < float(figures["ratio"])
    assert plain["old_kl"] == figures["old_kl"]


@pytest.mark.parametrize("name", NAMES)
def test_trust_regions_that_compare_means_need_them(name: str) -> None:
    for region in ("guard", "dppo"):
        config = configured(name, f"algorithm.trust_region={region}")
        assert "old" in ALGORITHMS.find(name)(config.algorithm).fixed
        with pytest.raises(ConfigError, match=f"trust_region is {region}, which compares the policies' means, but rec"):
            configured(name, f"algorithm.trust_region={region}", "algorithm.recompute=false")
    cps = ("algorithm.sde=cps", "algorithm.eta=0.8")
    configured(name, "algorithm.trust_region=dppo", *cps)
    with pytest.raises(ConfigError, match=r"expected sde=flow or dance, or trust_region=dppo"):
        configured(name, "algorithm.trust_region=guard", *cps)


@pytest.mark.parametrize("name", NAMES)
def test_the_sampler_is_chosen_by_name(name: str) -> None:
    config = configured(f"{name}_two_stage", "explore.steps=4", "algorithm.sde=cps", "algorithm.eta=0.8")
    sde = config.explored_steps(0)
    assert (sde.kind, sde.eta) == ("cps", 0.8)
    with pytest.raises(ConfigError, match=r"eta is 1.2 for steps of kind cps; expected at most 1"):
        configured(name, "algorithm.sde=cps", "algorithm.eta=1.2")
    with pytest.raises(ConfigError, match=r"does not exist with this algorithm.name, only with dancegrpo and flowgrpo"):
        configured("sol_rl", "algorithm.sde=cps")


def test_only_the_needed_velocities_are_computed() -> None:
    assert FlowGrpo(FlowGrpoSettings()).fixed == ("old", "reference")
    assert FlowGrpo(FlowGrpoSettings(kl_weight=0, recompute=False)).fixed == ()
    assert DanceGrpo(DanceGrpoSettings()).fixed == ("old",)
    assert DanceGrpo(DanceGrpoSettings(recompute=False)).fixed == ()


def test_dancegrpos_advantages_are_relative_to_each_prompt() -> None:
    rewards = torch.tensor([[0.1, 0.3, 0.8], [0.25, 0.25, 0.25], [0.7, 0.7001, 0.7]])
    found = DanceGrpo(DanceGrpoSettings()).advantages(rewards)
    for row, own in zip(found, rewards.double(), strict=True):
        assert torch.allclose(row.double(), (own - own.mean()) / (own.std() + 1e-8), atol=1e-6)
    assert torch.equal(found[1], torch.zeros(3))
    everywhere = DanceGrpo(DanceGrpoSettings(global_std=True)).advantages(rewards)
    assert torch.allclose(everywhere[0] / found[0], (rewards[0].std() / rewards.std()).expand(3), rtol=1e-5)


def test_a_window_is_drawn_for_each_iteration_or_moves_by_one_step_and_begins_again() -> None:
    window = Window(size=2, within=0.5)
    places = [window.first(10, iteration, 42) for iteration in range(60)]
    assert set(places) == {0, 1, 2, 3}
    assert places == [window.first(10, iteration, 42) for iteration in range(60)]
    assert places != [window.first(10, iteration, 43) for iteration in range(60)]
    # The last step is in no window.
    assert {Window(size=2).first(5, iteration, 42) for iteration in range(60)} == {0, 1, 2}
    assert {Window(size=9).first(5, iteration, 42) for iteration in range(9)} == {0}
    assert Window().first(10, 7, 42) == 0
    window = Window(size=3, order="progressive", every=2)
    assert [window.first(6, iteration, 42) for iteration in range(8)] == [0, 0, 1, 1, 2, 2, 0, 0]


def test_samples_of_one_step_are_refused(loaded: Backbone) -> None:
    generator, data = Generator(loaded, "bf16"), RecordedTrajectory(FlowSde(0.7), Window())
    made = generator.generate(PROMPT.text, [1, 2], steps=1, solver=data.solver("euler", 1, 0, 42), record=True)
    samples = TrainingSamples(made.latents, torch.zeros(2), {}, torch.zeros(2), made.recording)
    with pytest.raises(ValueError, match="no step of the samples is stochastic; expected at least two steps"):
        data.sigmas(samples, [1.0, 0.0])


@pytest.mark.parametrize("recipe", ["flowgrpo_two_stage", "dancegrpo_two_stage", "flowgrpo_fast_two_stage"])
def test_a_service_cannot_record(recipe: str) -> None:
    assert configured(recipe, "explore.steps=4").regenerate.at == "trainer"
    with pytest.raises(ConfigError, match="trains on every step or uses a solver of its own"):
        configured(recipe, "explore.steps=4", "rollout_url=http://gpu-node:8100", "regenerate.at=service")
