"""AWM: its gradient and its noise levels; test_published_parity.py has its values."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from solrl_core.families import Backbone
from solrl_trainer.algorithms.algorithm import Loss, Velocities, group_advantages
from solrl_trainer.algorithms.awm import Awm, AwmSettings, HighNoise, awm_loss
from solrl_trainer.algorithms.training_data import ForwardBatch
from training_helpers import make_policy, make_samples, tiny_config, train_on

WEIGHTINGS = ("uniform", "t", "t_squared", "huber", "ghuber")
SETTINGS: dict[str, Any] = {
    "weighting": "ghuber",
    "power": 0.25,
    "ratio_clip": 1.0,
    "kl_weight": 1e-4,
    "old_kl_weight": 1.0,
    "kl_weighting": "uniform",
}


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random arguments of the loss, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    v_old = draw(5, 2, 3)
    return {
        "v": v_old + 0.05 * draw(5, 2, 3),
        "v_old": v_old,
        "v_ref": v_old + 0.1 * draw(5, 2, 3),
        "x0": draw(5, 2, 3),
        "noise": draw(5, 2, 3),
        "t": torch.tensor([1.0, 0.9, 0.5, 0.3, 0.02], dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0, 0.3, -0.2, 0.0], dtype=torch.float64),
    }


def loss(given: dict[str, torch.Tensor], **changed: Any) -> Loss:
    return awm_loss(**given, **SETTINGS | changed)


def test_under_the_behaviour_policy_it_is_the_policy_gradient_of_the_matching_loss() -> None:
    """The ratio is 1, and the gradient that of advantage times matching error."""
    given = values()
    given["v"] = given["v_old"].clone().requires_grad_()
    found = loss(given, weighting="t", kl_weight=0.0)
    assert float(found.value.detach()) == pytest.approx(-float(given["advantages"].mean()), abs=1e-15)
    assert (float(found.figures["ratio"]), float(found.figures["clipped"])) == (1, 0)
    (gradient,) = torch.autograd.grad(found.value, given["v"])
    scale = (given["advantages"] * given["t"]).view(-1, 1, 1)
    off = given["v_old"] - (given["noise"] - given["x0"])
    assert torch.allclose(gradient, scale * 2 * off / 6 / 5, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("advantage", "nearer", "pulls"), [(1, True, False), (1, False, True), (-1, False, False)])
def test_beyond_the_clip_a_policy_is_not_moved_further(advantage: int, nearer: bool, pulls: bool) -> None:
    given = values()
    true = given["noise"] - given["x0"]
    given["v"] = (given["v_old"] + (0.2 if nearer else -0.2) * (true - given["v_old"])).requires_grad_()
    given["advantages"] = torch.full((5,), float(advantage), dtype=torch.float64)
    found = loss(given, weighting="uniform", ratio_clip=0.01, old_kl_weight=0.0, kl_weight=0.0)
    assert float(found.figures["clipped"]) == 1
    (gradient,) = torch.autograd.grad(found.value, given["v"])
    assert bool(gradient.abs().max() > 1e-6) == pulls


def test_a_perfect_prediction_has_a_finite_gradient() -> None:
    given = values()
    given["v"] = (given["noise"] - given["x0"]).requires_grad_()
    for weighting in WEIGHTINGS:
        (gradient,) = torch.autograd.grad(loss(given, weighting=weighting).value, given["v"])
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", ["v", "v_old", "v_ref", "x0", "noise", "t", "advantages"])
def test_a_nan_makes_the_loss_nan(name: str) -> None:
    given = values()
    given[name].view(-1)[0] = float("nan")
    assert not torch.isfinite(loss(given).value)


def test_the_reference_is_only_needed_for_its_penalty() -> None:
    assert Awm(AwmSettings()).fixed == ("reference", "old")
    without = Awm(AwmSettings(kl_weight=0))
    assert without.fixed == ("old",)
    given = values()
    batch = ForwardBatch(given["x0"], given["t"], given["advantages"], given["x0"], given["noise"])
    found = without.loss(batch, Velocities(given["v"], {"old": given["v_old"]}))
    assert "kl" not in found.figures
    assert float(found.value) == pytest.approx(float(loss(given, kl_weight=0.0).value))


def test_advantages_are_clipped_and_scaled() -> None:
    rewards = torch.tensor([[1.0, 3.0], [10.0, 20.0]], dtype=torch.float64)
    plain = group_advantages(rewards)
    assert torch.allclose(Awm(AwmSettings()).advantages(rewards), plain / 5, rtol=1e-12)
    found = Awm(AwmSettings(adv_clip=0.5, adv_max=2)).advantages(rewards)
    assert torch.allclose(found, 4 * plain.clamp(-0.5, 0.5))
    assert found.abs().max() == 2
    assert plain.abs().min() < 0.5
    local = Awm(AwmSettings(adv_clip=0.5, global_std=False)).advantages(rewards)
    assert torch.allclose(local, torch.tensor([[-1.0, 1.0]] * 2, dtype=torch.float64))


def test_only_the_higher_noise_levels_are_trained() -> None:
    """As the authors' code selects them: int(0.9 · 14) = 12 of 14 levels."""
    schedule: list[float] = [1 - i / 14 for i in range(15)]
    samples: Any = None  # not looked at
    assert HighNoise(0.9, initial=True).sigmas(samples, schedule) == schedule[:13]
    assert HighNoise(0.9, initial=False).sigmas(samples, schedule) == schedule[1:13]
    assert HighNoise(1.0, initial=True).sigmas(samples, schedule) == schedule
    assert HighNoise(0.01, initial=True).sigmas(samples, schedule) == schedule[:2]
    with pytest.raises(ValueError, match=r"algorithm\.noise_range=0\.1 selects one of 14 noise levels"):
        HighNoise(0.1, initial=False).sigmas(samples, schedule)


def test_an_update_trains_each_sample_at_these_levels(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("algorithm.name=awm", "regenerate.steps=5", "algorithm.noise_range=0.8", "optimizer.updates=1")
    config = tiny_config(*settings, "algorithm.initial_noise=false", "algorithm.timestep_fraction=1")
    seen: list[ForwardBatch] = []
    compute = Awm.loss

    def watched(algorithm: Awm, batch: ForwardBatch, velocity: Velocities) -> Loss:
        seen.append(batch)
        return compute(algorithm, batch, velocity)

    monkeypatch.setattr(Awm, "loss", watched)
    policy, optimizer = make_policy(backbone, config)
    figures = train_on(make_samples(backbone), policy, backbone, optimizer, config, 0).figures
    trained = [round(float(t), 5) for batch in seen for t in batch.t]
    levels = [round(float(sigma), 5) for sigma in backbone.sigmas(5)[1:4]]
    assert sorted(trained) == sorted(levels * 4)
    assert figures["ratio"] == pytest.approx(1, abs=1e-6)
    assert figures["old_distance"] == pytest.approx(0, abs=1e-9)
    assert figures["error"] > 0.1


@pytest.mark.parametrize("setting", [{"power": 0}, {"ratio_clip": 0}, {"adv_max": 0}, {"noise_range": 1.1}])
def test_invalid_settings_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        AwmSettings(**setting)
