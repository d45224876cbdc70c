"""Algorithms on the forward process: levels, pairs, bad values; test_published_parity.py has values and gradients."""

from typing import Any

import pytest
import torch
from solrl_core.families import Backbone
from solrl_trainer.algorithms.algorithm import Loss, Velocities
from solrl_trainer.algorithms.awm import Awm, AwmSettings, HighNoise
from solrl_trainer.algorithms.diffusionnft import nft_loss
from solrl_trainer.algorithms.dpo import best_with_worst
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.algorithms.training_data import ForwardBatch
from tests.trainer.training_helpers import make_policy, make_samples, tiny_config, train_on

ALL = ("v", "v_old", "v_ref", "x0", "noise", "t", "advantages")
READ = {"awm": ALL, "diffusionnft": ALL, "dpo": ("v", "v_ref", "x0", "noise")}
Values = dict[str, torch.Tensor]


def values() -> Values:
    """Velocities, latents and noise of six samples, float64; the first sample of each pair is better."""
    seed = torch.Generator().manual_seed(0)
    v_old, change, other, x0, noise = torch.randn(5, 6, 2, 3, generator=seed, dtype=torch.float64)
    return {
        **{"v": v_old + 0.05 * change, "v_old": v_old, "v_ref": v_old + 0.1 * other, "x0": x0, "noise": noise},
        "t": torch.tensor([1.0, 0.9, 0.5, 0.3, 0.2, 0.02], dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0, 0.3, -0.2, 0.0, -0.1], dtype=torch.float64),
    }


def loss(name: str, given: Values, **settings: Any) -> Loss:
    algorithm: Any = ALGORITHMS.find(name)
    batch = ForwardBatch(given["x0"], given["t"], given["advantages"], given["x0"], given["noise"])
    velocity = Velocities(given["v"], {"old": given["v_old"], "reference": given["v_ref"]})
    found: Loss = algorithm(algorithm.Settings(name=name, **settings)).loss(batch, velocity)
    return found


@pytest.mark.parametrize(("algorithm", "name"), [(algorithm, name) for algorithm in READ for name in READ[algorithm]])
def test_a_nan_makes_the_loss_nan(algorithm: str, name: str) -> None:
    given = values()
    given[name].view(-1)[0] = float("nan")
    assert not torch.isfinite(loss(algorithm, given).value)
    if algorithm == "dpo":  # also of a pair that has no loss
        assert not torch.isfinite(loss(algorithm, given | {"advantages": torch.zeros(6)}).value)


def test_a_perfect_prediction_has_a_finite_gradient() -> None:
    given = values()
    given["v"] = (given["noise"] - given["x0"]).requires_grad_()
    (gradient,) = torch.autograd.grad(loss("awm", given).value, given["v"])
    assert bool(gradient.isfinite().all())


def test_awms_reference_is_only_computed_for_its_penalty() -> None:
    assert Awm(AwmSettings()).fixed == ("reference", "old")
    assert Awm(AwmSettings(kl_weight=0)).fixed == ("old",)
    assert "kl" not in loss("awm", values(), kl_weight=0).figures


def test_awm_trains_only_the_higher_noise_levels() -> None:
    """As the authors' code selects them: int(0.9 · 14) = 12 of 14 levels."""
    schedule: list[float] = [1 - i / 14 for i in range(15)]
    samples: Any = None  # not looked at
    assert HighNoise().sigmas(samples, schedule) == schedule[:13]
    assert HighNoise().sigmas(samples, [1.0, 0.0]) == [1.0, 0.0]


def test_updates_of_awm_train_each_sample_at_these_levels(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("algorithm.name=awm", "regenerate.steps=5", "optimizer.updates=1", "algorithm.timestep_fraction=1")
    config = tiny_config(*settings)
    trained: list[float] = []
    compute = Awm.loss
    watched = lambda own, batch, velocity: trained.extend(batch.t.tolist()) or compute(own, batch, velocity)  # noqa: E731
    monkeypatch.setattr(Awm, "loss", watched)
    policy, optimizer = make_policy(backbone, config)
    train_on(make_samples(backbone), policy, backbone, optimizer, config, 0)
    assert sorted(trained) == pytest.approx(sorted(backbone.sigmas(5)[:4] * 4), abs=1e-5)


def test_diffusionnft_reports_the_share_of_clipped_advantages() -> None:
    given = values() | {"advantages": torch.tensor([-7.0, -0.5, 0.0, 0.25, 6.0, 5.1], dtype=torch.float64)}
    found = loss("diffusionnft", given)
    assert float(found.value) == float(nft_loss(**given, beta=1.0, adv_clip=5.0, kl_weight=1e-4))
    assert float(found.figures["clipped"]) == 3 / 6


def test_a_pair_with_equal_advantages_has_no_loss() -> None:
    given = values()
    untied = loss("dpo", {name: value[2:] for name, value in given.items()}, beta=20)
    given["advantages"][:2] = 0.25
    given["v"].requires_grad_()
    found = loss("dpo", given, beta=20)
    assert float(found.value.detach()) == pytest.approx(float(untied.value) * 2 / 3)
    for figure in ("margin", "accuracy"):
        assert float(found.figures[figure]) == pytest.approx(float(untied.figures[figure]) * 2 / 3)
    assert float(found.figures["tied"]) == pytest.approx(1 / 3)
    (gradient,) = torch.autograd.grad(found.value, given["v"])
    assert float(gradient[:2].abs().max()) == 0
    assert float(gradient[2:].abs().min()) > 0


def test_the_best_are_paired_with_the_worst_of_their_prompt() -> None:
    advantages = torch.tensor([0.5, -1.0, 2.0, 0.0, *(3.0, 1.0, 2.0, -4.0)])
    assert best_with_worst(advantages, 4).tolist() == [[2, 1], [0, 3], [4, 7], [6, 5]]
    # The middle sample of an odd number is left out.
    assert best_with_worst(torch.tensor([0.5, -1.0, 2.0, 0.0, 0.1]), 5).tolist() == [[2, 1], [0, 3]]
    # Equal samples are paired in their order; with many equal values, an unstable sort would order them differently.
    pairs = best_with_worst(torch.zeros(2 * 40), 40).tolist()
    assert pairs == [[40 * prompt + k, 40 * prompt + 39 - k] for prompt in range(2) for k in range(20)]
