"""Diffusion-DPO: its gradient and its pairs; test_published_parity.py has its values."""

import math

import pytest
import torch
from solrl_core.families import Backbone
from solrl_trainer.algorithms.dpo import best_with_worst, dpo_loss
from training_helpers import PROMPTS, make_policy, make_samples, tiny_config, train_on


def values(pairs: int = 3) -> dict[str, torch.Tensor]:
    """Random arguments of the loss, in float64; the first sample of each pair is better."""
    generator = torch.Generator().manual_seed(5)

    def draw() -> torch.Tensor:
        return torch.randn(2 * pairs, 2, 3, generator=generator, dtype=torch.float64)

    v_ref = draw()
    noise = draw()[::2].repeat_interleave(2, 0)
    advantages = torch.tensor([0.5, -0.5] * pairs, dtype=torch.float64)
    return {"v": v_ref + 0.05 * draw(), "v_ref": v_ref, "x0": draw(), "noise": noise, "advantages": advantages}


def test_at_the_reference_the_loss_is_log_2_and_its_gradient_linear_in_beta() -> None:
    given = values()
    given["v"] = given["v_ref"].clone().requires_grad_()
    true = given["noise"] - given["x0"]
    sign = torch.tensor([1.0, -1.0] * 3, dtype=torch.float64).view(-1, 1, 1)
    for beta in (20.0, 2000.0):
        found = dpo_loss(**given, beta=beta)
        assert float(found.value.detach()) == pytest.approx(math.log(2), rel=1e-12)
        assert float(found.figures["accuracy"]) == 0
        assert float(found.figures["error"]) == float(found.figures["reference_error"])
        (gradient,) = torch.autograd.grad(found.value, given["v"])
        expected = sign * (given["v_ref"] - true) * 2 / 6 * beta / 4 / 3
        assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-15)


def test_a_pair_with_equal_advantages_has_no_loss() -> None:
    given = values()
    untied = dpo_loss(**{name: value[2:] for name, value in given.items()}, beta=20)
    given["advantages"][:2] = 0.25
    given["v"].requires_grad_()
    found = dpo_loss(**given, beta=20)
    assert float(found.value.detach()) == pytest.approx(float(untied.value) * 2 / 3)
    assert float(found.figures["margin"]) == pytest.approx(float(untied.figures["margin"]) * 2 / 3)
    assert float(found.figures["accuracy"]) == pytest.approx(float(untied.figures["accuracy"]) * 2 / 3)
    assert float(found.figures["tied"]) == pytest.approx(1 / 3)
    (gradient,) = torch.autograd.grad(found.value, given["v"])
    assert float(gradient[:2].abs().max()) == 0
    assert float(gradient[2:].abs().min()) > 0


@pytest.mark.parametrize("name", ["v", "v_ref", "x0", "noise"])
def test_a_nan_makes_the_loss_nan(name: str) -> None:
    given = values()
    given[name].view(-1)[0] = float("nan")
    assert not torch.isfinite(dpo_loss(**given, beta=20).value)
    given["advantages"][:] = 0
    assert not torch.isfinite(dpo_loss(**given, beta=20).value)


def test_the_best_are_paired_with_the_worst_of_their_prompt() -> None:
    advantages = torch.tensor([0.5, -1.0, 2.0, 0.0, *(3.0, 1.0, 2.0, -4.0)])
    assert best_with_worst(advantages, 4).tolist() == [[2, 1], [0, 3], [4, 7], [6, 5]]
    # The middle sample of an odd number is left out.
    assert best_with_worst(torch.tensor([0.5, -1.0, 2.0, 0.0, 0.1]), 5).tolist() == [[2, 1], [0, 3]]
    # Equal samples are paired in their order; with many equal values, an unstable sort would order them differently.
    pairs = best_with_worst(torch.zeros(2 * 40), 40).tolist()
    assert pairs == [[40 * prompt + k, 40 * prompt + 39 - k] for prompt in range(2) for k in range(20)]


def test_updates_make_the_policy_prefer_the_better_samples(backbone: Backbone) -> None:
    settings = ("algorithm.name=dpo", "algorithm.beta=100", "algorithm.timestep_fraction=1", "explore.keep=4")
    config = tiny_config(*settings, "optimizer.updates=4", "optimizer.learning_rate=3e-4")
    policy, optimizer = make_policy(backbone, config)
    samples = make_samples(backbone, [0.1, -2.0, 3.0, -0.5], PROMPTS[:1])
    *_, last = (train_on(samples, policy, backbone, optimizer, config, i) for i in range(8))
    assert last.figures["margin"] > 0
    assert last.figures["accuracy"] > 0.5
    assert last.loss < math.log(2)
