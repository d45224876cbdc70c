"""Algorithms: lookup by name, their settings, and what the interface gives them."""

import sys
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from solrl_core.families import Backbone
from solrl_trainer.algorithms.algorithm import Algorithm, AlgorithmSettings, Loss, Velocities, group_advantages
from solrl_trainer.algorithms.diffusionnft import DiffusionNftSettings
from solrl_trainer.algorithms.dpo import DiffusionDpo
from solrl_trainer.algorithms.training_data import ForwardBatch, ForwardProcess
from solrl_trainer.algorithms.trial import try_algorithm
from solrl_trainer.commands.preflight import check_run
from solrl_trainer.policy.policy import CURRENT
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import RECIPES, ConfigError, resolve
from tests.trainer.training_helpers import PROMPTS, make_policy, make_samples, tiny_config, train_on

HERE = __name__


class WeightedSettings(AlgorithmSettings):
    """Settings of `Weighted`."""

    temperature: Annotated[float, Field(gt=0)] = 1.0


class Weighted(Algorithm[WeightedSettings, ForwardBatch]):
    """Advantage-weighted flow matching, which needs no other policy."""

    Settings = WeightedSettings
    trains_on = ForwardProcess()

    def loss(self, batch: ForwardBatch, velocity: Velocities) -> Loss:
        weight = (batch.advantages / self.settings.temperature).exp()
        off = ((velocity.current - (batch.noise - batch.x0)) ** 2).flatten(1).mean(1)
        return Loss((weight * off).mean(), {"weight": float(weight.mean()), "one": 1.0})


class Pairs(DiffusionDpo):
    """Diffusion-DPO that records its micro-batches."""

    seen: list[tuple[ForwardBatch, Velocities]] = []  # noqa: RUF012

    def loss(self, batch: ForwardBatch, velocity: Velocities) -> Loss:
        Pairs.seen.append((batch, velocity))
        return super().loss(batch, velocity)


class Forgetful(Algorithm[AlgorithmSettings, ForwardBatch]):
    """Uses a velocity that it does not name in `fixed`."""

    trains_on = ForwardProcess()

    def loss(self, batch: ForwardBatch, velocity: Velocities) -> Loss:
        return Loss((velocity.current - velocity.old).mean(), {})


class Bare(Algorithm[AlgorithmSettings, ForwardBatch]):
    """Defines nothing."""


def faulty(**fields: Any) -> type[Weighted]:
    """`Weighted` with these fields or methods instead of its own."""
    for name, value in fields.items():
        if isinstance(value, FunctionType):
            value.__name__ = name
    return type("Faulty", (Weighted,), fields)


Tensors = faulty(loss=lambda own, batch, velocity: Weighted.loss(own, batch, velocity).value)
Unreduced = faulty(loss=lambda own, batch, velocity: Loss(velocity.current - batch.x0, {}))
Detached = faulty(loss=lambda own, batch, velocity: Loss(batch.x0.mean(), {}))
Figured = faulty(loss=lambda own, batch, velocity: Loss(velocity.current.mean(), {"weights": batch.advantages}))
Misspelt = faulty(loss=lambda own, batch, velocity: Loss(batch.nois.mean(), {}))
Flat = faulty(advantages=lambda own, rewards: group_advantages(rewards).flatten())
Beyond = faulty(units=lambda own, advantages, kept: torch.arange(len(advantages) + 1)[:, None])
Idle = faulty(units=lambda own, advantages, kept: torch.empty(0, 2, dtype=torch.long))
Based = faulty(fixed=("base",))
Untyped = faulty(Settings=dict)


def configured(name: str, *overrides: str) -> RunConfig:
    return tiny_config("explore.keep=4", f"algorithm.name={HERE}:{name}", *overrides)


def test_an_algorithm_of_an_installed_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[solrl.algorithms]\nweighted = {HERE}:Weighted\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert tiny_config("algorithm.name=weighted", "algorithm.temperature=2").algorithm.temperature == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("difusionnft", r"did you mean 'diffusionnft'.*expected one of \[.*'diffusionnft'.*\], or package"),
        (f"{HERE}:WeightedSettings", "expected a subclass of .*Algorithm"),
        (f"{HERE}:Bare", "expected it to define `loss` and `trains_on`"),
        (f"{HERE}:Untyped", "expected `Settings` to be a subclass of .*AlgorithmSettings"),
    ],
)
def test_an_unknown_algorithm_is_refused_and_named(name: str, said: str) -> None:
    """core/test_registry.py has names that no registry can find."""
    with pytest.raises(ConfigError, match=rf"setting algorithm.name \(from --set\): .*{said}"):
        tiny_config(f"algorithm.name={name!r}")


def test_settings_belong_to_the_chosen_algorithm() -> None:
    config = configured("Weighted", "algorithm.temperature=0.5", "algorithm.global_std=false")
    assert config.algorithm == WeightedSettings(name=f"{HERE}:Weighted", temperature=0.5, global_std=False)
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert isinstance(again.algorithm, WeightedSettings)
    assert tiny_config().algorithm == DiffusionNftSettings()
    with pytest.raises(ConfigError, match=r"got setting 'algorithm.beta'.*does not exist"):
        configured("Weighted", "algorithm.beta=1")
    with pytest.raises(ConfigError, match=r"setting algorithm.temperature \(from --set\): got 0; .*greater than 0"):
        configured("Weighted", "algorithm.temperature=0")
    with pytest.raises(ConfigError, match=r"got setting 'algorithm.temperature'.*does not exist"):
        tiny_config("algorithm.temperature=1")


def test_an_algorithm_of_another_kind_trains_and_logs(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("Weighted")
    policy, optimizer = make_policy(backbone, config)
    for name in ("old", "reference"):
        monkeypatch.setattr(type(policy), name, None)  # the algorithm names neither, so neither may be used
    samples = make_samples(backbone)
    before = policy.tensors(CURRENT)
    logged = train_on(samples, policy, backbone, optimizer, config, 0)
    assert logged.figures.keys() == {"weight", "one"}
    # Each sample is trained equally often, so the mean over all rows equals the mean over samples.
    assert logged.figures["weight"] == pytest.approx(float(samples.advantages.exp().mean()))
    assert logged.figures["one"] == pytest.approx(1)
    assert any(not torch.equal(value, before[key]) for key, value in policy.tensors(CURRENT).items())


def test_a_pair_shares_its_batch_its_time_and_its_noise(backbone: Backbone) -> None:
    config = configured("Pairs", "optimizer.batch=5", "regenerate.steps=3", "algorithm.timestep_fraction=1")
    policy, optimizer = make_policy(backbone, config)
    samples = make_samples(backbone, [0.1, -2.0, 3.0, -0.5], PROMPTS[:1])
    Pairs.seen.clear()
    train_on(samples, policy, backbone, optimizer, config, 0)
    pairs = [
        (tuple(b.advantages[i : i + 2].tolist()), tuple(b.t[i : i + 2].tolist()), b.noise[i : i + 2], b.x0[i : i + 2])
        for b, _ in Pairs.seen
        for i in range(0, len(b.t), 2)
    ]
    # Two pairs, each at three times; a batch of five samples fits two pairs.
    assert len(pairs) == 6
    assert max(len(b.t) for b, _ in Pairs.seen) <= 4
    best, second = (3.0, -2.0), (torch.tensor(0.1).item(), -0.5)
    assert sorted(values for values, _, _, _ in pairs) == [second] * 3 + [best] * 3
    for values, times, noise, x0 in pairs:
        assert times[0] == times[1]
        assert torch.equal(noise[0], noise[1])
        rows = [2, 1] if values == best else [0, 3]
        assert torch.equal(x0, samples.latents[rows])
    assert len({(values, times) for values, times, _, _ in pairs}) == 6
    assert len({float(noise.sum()) for _, _, noise, _ in pairs}) == 6
    assert all(v.current.requires_grad and not v.reference.requires_grad for _, v in Pairs.seen)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Tensors", r"loss returned a Tensor of shape \(\); expected a `Loss` \(test_algorithms.py:\d+\)"),
        ("Unreduced", r"loss returned a `Loss` whose value is a Tensor of shape \(8, .*; expected a scalar .*py:"),
        ("Detached", r"loss returned a `Loss` whose value is a Tensor of shape \(\) without gradient; expected"),
        ("Figured", r"loss returned a `Loss` whose figure 'weights' is a Tensor of shape \(8,\); expected a number"),
        ("Flat", r"advantages returned a Tensor of shape \(8,\); expected shape \(2, 4\) \(test_algorithms.py:\d+\)"),
        ("Beyond", r"units returned torch.int64 from 0 to 8; expected .*, whole numbers from 0 to 7"),
        ("Idle", r"units returned a Tensor of shape \(0, 2\); expected at least one row"),
        ("Based", r"`fixed` is \('base',\); expected a tuple of some of \('old', 'reference'\)"),
        ("Forgetful", r"loss failed on random samples .*: ValueError: .*did not request the 'old' policy's velocity"),
        ("Misspelt", r"loss failed .*: AttributeError: .*'nois' \(test_algorithms.py:\d+\)"),
    ],
)
def test_a_dry_run_refuses_a_faulty_algorithm_by_its_method_and_line(tmp_path: Path, name: str, said: str) -> None:
    config = configured(name, f"output={tmp_path / 'run'}")
    with pytest.raises(ValueError, match=f"^algorithm '{HERE}:{name}': {said}"):
        check_run(config, resume=False, dry=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipes_algorithm_passes_the_trial(recipe: str) -> None:
    config = resolve(f"mini-sana/{recipe}/clipscore").config
    try_algorithm(config.algorithm, config.explore.keep)
