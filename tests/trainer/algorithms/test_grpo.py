"""FlowGRPO and DanceGRPO: first gradients, clipping, divergence, advantages, and windows of stochastic steps."""

from dataclasses import replace

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.sde import FlowSde
from solrl_engine.sampler import Sampler
from solrl_proto.rollouts import Plan, PromptItem, StochasticSteps
from solrl_trainer.algorithms.dancegrpo import DanceGrpo, DanceGrpoSettings
from solrl_trainer.algorithms.flowgrpo import FlowGrpo, FlowGrpoSettings
from solrl_trainer.algorithms.grpo import clipped_objective
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.algorithms.training_data import RecordedTrajectory, TrainingSamples, TrajectoryBatch, Window
from solrl_trainer.policy.policy import Policy
from solrl_trainer.policy.update import UpdateFigures, training_pairs
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError, resolve
from tests.trainer.run_folders import iteration_record
from tests.trainer.training_helpers import TINY, make_policy, updater

STEPS = 4
ADVANTAGES = [1.0, -1.0, 0.5, -2.0]
PROMPT = PromptItem(id="p", text="a red circle")
NAMES = ["flowgrpo", "dancegrpo"]
FAST = ("flowgrpo_fast", "flow")


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


@pytest.mark.parametrize(("recipe", "sde"), [("flowgrpo", "flow"), ("flowgrpo", "cps"), ("dancegrpo", "dance"), FAST])
def test_the_first_policy_gradient(recipe: str, sde: str, backbone: Backbone, loaded: Backbone) -> None:
    config = configured(recipe, f"algorithm.sde={sde}", *(["algorithm.kl_weight=0"] if "flow" in recipe else []))
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
    assert found.figures["old_kl"] == pytest.approx(0, abs=1e-12)
    assert found.loss == pytest.approx(-sum(ADVANTAGES) / 4, abs=1e-5)
    norm = float(torch.stack([part.norm() for part in gradient]).norm())
    assert norm > 1e-3
    for parameter, part in zip(policy.parameters, gradient, strict=True):
        assert float((parameter.grad - part).norm()) <= 1e-3 * norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_without_effect_have_no_gradient_however_far_they_have_gone(dtype: torch.dtype) -> None:
    """The first three are left out at any ratio, also one that overflows; the last two train."""
    change = torch.tensor([1e4, -1e4, 1e4, 0.2, -0.1], dtype=dtype, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.0, -2.0, 3.0], dtype=dtype)
    value, figures = clipped_objective(change, advantages, 0.3)
    (gradient,) = torch.autograd.grad(value, change)
    expected = torch.cat([torch.zeros(3, dtype=dtype), -advantages[3:] * change[3:].detach().exp() / 5])
    torch.testing.assert_close(gradient, expected)
    assert value.isfinite()
    assert all(torch.as_tensor(figure).isfinite() for figure in figures.values())
    assert figures["clipped"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_ratio_is_to_the_behaviour_policy_or_recording(
    recompute: bool, backbone: Backbone, loaded: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples are the base's, and the behaviour policy is another: only the recording knows that."""
    monkeypatch.setattr(Policy, "is_behaviour", lambda _: False)  # else it shares the current policy's pass
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


@pytest.mark.parametrize("name", NAMES)
def test_the_sampler_is_chosen_by_name(name: str) -> None:
    config = configured(f"{name}_two_stage", "explore.steps=4", "algorithm.sde=cps", "algorithm.eta=0.8")
    sde = config.exploration_plan(0).sde
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
    data = FlowGrpo(FlowGrpoSettings(window=3, window_order="progressive", window_every=2)).trains_on
    assert [data.solver("euler", 6, iteration, 42) for iteration in range(8)] == [
        StochasticSteps(kind="flow", eta=0.7, first=first, count=3) for first in (0, 0, 1, 1, 2, 2, 0, 0)
    ]


def test_samples_of_one_step_are_refused(loaded: Backbone) -> None:
    generator, data = Generator(loaded, "bf16"), RecordedTrajectory(FlowSde(0.7), Window())
    made = generator.generate(PROMPT.text, [1, 2], steps=1, solver=data.solver("euler", 1, 0, 42), record=True)
    samples = TrainingSamples(made.latents, torch.zeros(2), {}, torch.zeros(2), made.recording)
    with pytest.raises(ValueError, match="no step of the samples is stochastic; expected at least two steps"):
        data.sigmas(samples, [1.0, 0.0])


class OwnSolver(FlowGrpo):
    """FlowGRPO with a solver object, which a plan cannot name."""

    @property
    def trains_on(self) -> RecordedTrajectory:
        return RecordedTrajectory(FlowSde(0.7))


OWN = f"algorithm.name={__name__}:OwnSolver"


def test_a_plan_cannot_name_a_solver_of_ones_own() -> None:
    with pytest.raises(ConfigError, match="OwnSolver do not take stochastic steps that a plan can name"):
        configured("naive_scaling", OWN, "regenerate.at=trainer", "explore.sampler=training", "explore.steps=4")


def test_every_step_of_a_sample_is_recorded_and_a_batch_has_those_of_its_samples(loaded: Backbone) -> None:
    samples = recorded(loaded, configured("naive_scaling", OWN))
    recording = samples.recording
    assert recording.states.shape == (STEPS + 1, *samples.latents.shape)
    assert recording.log_probs.shape == (STEPS, 4)
    assert (recording.sigmas[0], recording.sigmas[-1]) == (1, 0)
    assert torch.equal(recording.states[-1], samples.latents)
    some = recording.rows([2, 0])
    assert torch.equal(some.states, recording.states[:, [2, 0]])
    assert torch.equal(some.log_probs, recording.log_probs[:, [2, 0]])
    rows, steps = training_pairs(4, STEPS, 1.0, torch.Generator().manual_seed(0))
    sigmas = torch.tensor(recording.sigmas, dtype=torch.float64)
    batch = RecordedTrajectory(FlowSde(0.7)).batch(samples, rows, steps, sigmas, None, torch.device("cpu"))
    part = batch.rows(slice(3, 7))
    for place, (row, step) in enumerate(zip(rows[3:7].tolist(), steps[3:7].tolist(), strict=True)):
        assert torch.equal(part.x[place], recording.states[step, row])
        assert torch.equal(part.x_next[place], recording.states[step + 1, row])
        assert float(part.log_prob[place]) == float(recording.log_probs[step, row])
        assert (float(part.sigma[place]), float(part.sigma_next[place])) == recording.sigmas[step : step + 2]
        assert float(part.advantages[place]) == ADVANTAGES[row]
