"""Training on recorded trajectories with a small test algorithm: a clipped ratio of probabilities."""

import math
from pathlib import Path
from typing import Annotated

import pytest
import torch
from pydantic import Field
from real_runs import Watcher
from solrl_core.families import Backbone
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.sde import FlowSde
from solrl_engine.sampler import Sampler
from solrl_proto.rollouts import Plan, PromptItem
from solrl_trainer.algorithms.algorithm import Algorithm, AlgorithmSettings, Loss, Velocities
from solrl_trainer.algorithms.training_data import RecordedTrajectory, TrainingData, TrainingSamples, TrajectoryBatch
from solrl_trainer.loop import train
from solrl_trainer.policy.policy import CURRENT
from solrl_trainer.policy.update import training_pairs
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError, resolve
from training_helpers import TINY, iterations, make_policy, updater

STEPS, ETA, CLIP = 3, 0.7, 0.2
PROMPT = PromptItem(id="p", text="a red circle")
ADVANTAGES = [1.0, -1.0, 0.5, -0.5]


class ClippedSettings(AlgorithmSettings):
    """Settings of `ClippedRatio`."""

    clip: Annotated[float, Field(gt=0)] = CLIP


class ClippedRatio(Algorithm[ClippedSettings, TrajectoryBatch]):
    """PPO's clipped objective on the steps of FlowGRPO's sampler."""

    Settings = ClippedSettings

    @property
    def trains_on(self) -> TrainingData[TrajectoryBatch]:
        return RecordedTrajectory(FlowSde(ETA))

    def loss(self, batch: TrajectoryBatch, velocity: Velocities) -> Loss:
        ratio = (batch.log_prob_under(velocity.current) - batch.log_prob).exp()
        clipped = ratio.clamp(1 - self.settings.clip, 1 + self.settings.clip)
        value = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
        return Loss(value, {"ratio": float(ratio.detach().mean())})


def configured(*overrides: str) -> RunConfig:
    settings = (f"algorithm.name={__name__}:ClippedRatio", "algorithm.timestep_fraction=1", *overrides)
    return resolve("mini-sana/naive_scaling/clipscore", overrides=[*TINY, "optimizer.updates=1", *settings]).config


def test_a_service_cannot_regenerate_recorded_samples_nor_a_plan_name_a_solver_of_ones_own() -> None:
    with pytest.raises(ConfigError, match="ClippedRatio trains on every step or uses a solver of its own"):
        configured("rollout_url=http://gpu-node:8100", "regenerate.at=service")
    with pytest.raises(ConfigError, match="ClippedRatio do not take stochastic steps that a plan can name"):
        configured("regenerate.at=trainer", "explore.sampler=training", "explore.steps=4")


@pytest.fixture
def samples(loaded: Backbone) -> TrainingSamples:
    """Four seeds of one prompt, regenerated with recordings."""
    data = ClippedRatio(ClippedSettings()).trains_on
    sampler = Sampler(
        Generator(loaded, "bf16"),
        lambda: Plan(steps=STEPS),
        lambda: data.solver("euler", STEPS, 0, 42),
        data.recorded,
    )
    found = sampler.sample([PROMPT] * 4, [3, 1, 4, 15])
    conditioning, prompts = loaded.conditioning(PROMPT.text), torch.zeros(4, dtype=torch.long)
    return TrainingSamples(found.latents, torch.tensor(ADVANTAGES), conditioning, prompts, found.recording)


def test_every_step_of_a_regenerated_sample_is_recorded(samples: TrainingSamples) -> None:
    recording = samples.recording
    assert recording.states.shape == (STEPS + 1, *samples.latents.shape)
    assert recording.log_probs.shape == (STEPS, 4)
    assert (recording.sigmas[0], recording.sigmas[-1]) == (1, 0)
    assert torch.equal(recording.states[-1], samples.latents)
    some = recording.rows([2, 0])
    assert torch.equal(some.states, recording.states[:, [2, 0]])
    assert torch.equal(some.log_probs, recording.log_probs[:, [2, 0]])


def log_prob(x: torch.Tensor, x_next: torch.Tensor, v: torch.Tensor, now: float, then: float) -> torch.Tensor:
    """Log-probability of one step of one sample, from the formula."""
    s = ETA * math.sqrt(now / (1 - (then if now == 1 else now)))
    dt = then - now
    mean = x * (1 + s**2 / (2 * now) * dt) + v * (1 + s**2 * (1 - now) / (2 * now)) * dt
    deviation = s * math.sqrt(-dt)
    return (-((x_next - mean) ** 2) / (2 * deviation**2) - math.log(deviation) - math.log(2 * math.pi) / 2).mean()


def expected_gradient(
    samples: TrainingSamples, backbone: Backbone, policy: torch.nn.Module, parameters: list[torch.nn.Parameter]
) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Loss and gradient over all steps of all samples, one at a time."""
    recording = samples.recording
    losses = []
    for sample, advantage in enumerate(ADVANTAGES):
        for step in range(STEPS):
            now, then = recording.sigmas[step : step + 2]
            x, x_next = recording.states[step, sample].clone(), recording.states[step + 1, sample].clone()
            v = backbone.velocity(policy, x[None], torch.tensor([now]), samples.conditioning)[0]
            ratio = (log_prob(x, x_next, v, now, then) - recording.log_probs[step, sample].clone()).exp()
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
    loss = torch.stack(losses).mean()
    return float(loss.detach()), torch.autograd.grad(loss, parameters)


def test_an_update_uses_the_gradient_of_the_clipped_ratio(backbone: Backbone, samples: TrainingSamples) -> None:
    config = configured("optimizer.batch=5", "optimizer.max_grad_norm=1e9")
    policy, optimizer = make_policy(backbone, config)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters:  # move away from the behaviour policy, so that some ratios are clipped
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    loss, gradient = expected_gradient(samples, backbone, policy.transformer, policy.parameters)
    before = policy.tensors(CURRENT)
    found = updater(policy, backbone, optimizer, config).update(samples, 0)
    assert found.loss == pytest.approx(loss, rel=1e-4)
    assert found.figures["ratio"] != pytest.approx(1, abs=1e-3)
    norm = torch.stack([part.norm() for part in gradient]).norm()
    assert float(norm) > 1e-3
    for parameter, part in zip(policy.parameters, gradient, strict=True):
        assert float((parameter.grad - part).norm()) <= 1e-3 * float(norm)
    assert any(not torch.equal(value, before[key]) for key, value in policy.tensors(CURRENT).items())


def test_a_batch_contains_the_recorded_steps_of_its_samples(samples: TrainingSamples) -> None:
    recording = samples.recording
    rows, steps = training_pairs(4, STEPS, 1.0, torch.Generator().manual_seed(0))
    sigmas = torch.tensor(recording.sigmas, dtype=torch.float64)
    data = RecordedTrajectory(FlowSde(ETA))
    batch = data.batch(samples, rows, steps, sigmas, None, torch.device("cpu"))
    part = batch.rows(slice(3, 7))
    for place, (row, step) in enumerate(zip(rows[3:7].tolist(), steps[3:7].tolist(), strict=True)):
        assert torch.equal(part.x[place], recording.states[step, row])
        assert torch.equal(part.x_next[place], recording.states[step + 1, row])
        assert float(part.log_prob[place]) == float(recording.log_probs[step, row])
        assert (float(part.sigma[place]), float(part.sigma_next[place])) == recording.sigmas[step : step + 2]
        assert float(part.advantages[place]) == ADVANTAGES[row]
    assert data.draw(4, (1,), torch.Generator()) is None


def test_a_run_without_a_service_trains_on_trajectories(tmp_path: Path) -> None:
    small = ("explore.prompts=2", "explore.candidates=6", "explore.keep=4", f"explore.steps={STEPS}", "iterations=1")
    config = configured(*small, "evaluate.prompts=1", "evaluate.seeds=1", "evaluate.steps=1", f"output={tmp_path}")
    samples = train(config, Watcher()).samples
    assert samples.recording.states.shape == (STEPS + 1, 8, *samples.latents.shape[2:])
    assert torch.equal(samples.recording.states[-1], samples.latents.flatten(0, 1))
    (line,) = iterations(tmp_path)
    assert line["objective/ratio"] == pytest.approx(1, abs=1e-3)
