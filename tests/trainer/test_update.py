"""One iteration's optimisation: repeatable, with the right number of steps, and stopped by non-finite values."""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from solrl_core.adapter import lora_b_key
from solrl_core.families import Backbone, load_backbone
from solrl_core.sampling.generator import Generator
from solrl_trainer.algorithms.algorithm import Loss, Velocities
from solrl_trainer.algorithms.diffusionnft import DiffusionNft, DiffusionNftSettings
from solrl_trainer.algorithms.training_data import ForwardBatch
from solrl_trainer.policy.policy import CURRENT, OLD, Policy
from solrl_trainer.policy.update import UpdateFigures, training_pairs
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve
from tests.core.lora_helpers import own_copy
from tests.trainer.training_helpers import (
    PROMPTS,
    TINY,
    make_policy,
    make_samples,
    same,
    tiny_config,
    train_on,
    updater,
)

MINIATURES = ("mini-sana", "mini-sd3", "mini-flux")


def trained(
    loaded: Backbone, config: RunConfig, iteration: int = 0, noise: int = 0
) -> tuple[dict[str, torch.Tensor], UpdateFigures]:
    """Current weights after one iteration of a new policy, and the logged figures."""
    mine = own_copy(loaded)
    policy, optimizer = make_policy(mine, config)
    samples = make_samples(mine)
    torch.manual_seed(noise)
    logged = train_on(samples, policy, mine, optimizer, config, iteration)
    return policy.tensors(CURRENT), logged


def test_an_update_depends_only_on_seed_and_iteration(loaded: Backbone) -> None:
    config = tiny_config()
    weights, logged = trained(loaded, config, iteration=3, noise=1)
    again, logged_again = trained(loaded, config, iteration=3, noise=2)
    assert same(weights, again)
    assert logged == logged_again
    other, _ = trained(loaded, config, iteration=4)
    assert not same(weights, other)


def test_a_layer_without_a_gradient_is_refused_unless_named(loaded: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    name, config = "transformer_blocks.0.attn1.to_q", tiny_config()
    mine = own_copy(loaded)
    policy, optimizer = make_policy(mine, config)
    layer = policy.layers[name]
    whole = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: whole(x).detach())
    start = policy.tensors(CURRENT)
    with pytest.raises(ValueError, match=rf"1 adapted layers.*{name}"):
        train_on(make_samples(mine), policy, mine, optimizer, config, 0)
    assert same(start, policy.tensors(CURRENT))
    monkeypatch.setattr(type(mine), "unused_lora_layers", name)
    train_on(make_samples(mine), policy, mine, optimizer, config, 0)
    products = {key: value for key, value in policy.tensors(CURRENT).items() if "lora_B" in key}
    assert {key for key, value in products.items() if not value.any()} == {lora_b_key(name)}


def test_only_the_current_weights_change(backbone: Backbone) -> None:
    config = tiny_config()
    policy, optimizer = make_policy(backbone, config)
    before = {name: policy.tensors(name) for name in (CURRENT, OLD)}
    base = {k: v.clone() for k, v in backbone.transformer.state_dict().items() if "lora" not in k}
    logged = train_on(make_samples(backbone), policy, backbone, optimizer, config, 0)
    after = policy.tensors(CURRENT)
    assert all(not torch.equal(value, before[CURRENT][key]) for key, value in after.items() if "lora_B" in key)
    assert same(policy.tensors(OLD), before[OLD])
    assert same(policy.averaged, before[CURRENT]), "they follow once per iteration"
    assert all(torch.equal(value, base[key]) for key, value in backbone.transformer.state_dict().items() if key in base)
    assert logged.figures.keys() == {"old_distance", "kl", "clipped"}
    assert logged.figures["clipped"] == 0.0
    # Before the first of two steps, current and old are the base; before the second, they are not.
    assert 0 < logged.figures["kl"] == pytest.approx(logged.figures["old_distance"])
    assert 0 < logged.grad_norm <= logged.grad_norm_max


def test_more_steps_than_pairs_are_refused(backbone: Backbone) -> None:
    config = tiny_config("optimizer.updates=9")
    policy, optimizer = make_policy(backbone, config)
    before = policy.tensors(CURRENT)
    with pytest.raises(ValueError, match=r"got 9 optimizer\.updates for the 8 \(sample, timestep\) pairs"):
        train_on(make_samples(backbone), policy, backbone, optimizer, config, 0)
    assert same(policy.tensors(CURRENT), before)


def test_an_update_trains_every_sample_at_its_timesteps_with_noise_of_its_own(backbone: Backbone) -> None:
    seen: list[tuple[float, float, float]] = []

    class Watched(DiffusionNft):
        def loss(self, batch: ForwardBatch, velocity: Velocities) -> Loss:
            samples, noise = (values.flatten(1).sum(1).tolist() for values in (batch.x0, batch.noise))
            seen.extend(zip(samples, batch.t.tolist(), noise, strict=True))
            found = super().loss(batch, velocity)
            return Loss(found.value, {**found.figures, "one": 1.0})

    config = tiny_config("algorithm.timestep_fraction=0.5")
    policy, optimizer = make_policy(backbone, config)
    algorithm = Watched(DiffusionNftSettings(timestep_fraction=0.5))
    logged = replace(updater(policy, backbone, optimizer, config), algorithm=algorithm).update(
        make_samples(backbone), 4
    )
    # Four samples at two of four timesteps, in two steps.
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    assert set(Counter(sample for sample, _, _ in seen).values()) == {2}
    assert len({(sample, t) for sample, t, _ in seen}) == len({noise for _, _, noise in seen}) == len(seen) == 8
    # Figures are means over both steps.
    assert logged.figures["one"] == pytest.approx(1)


def test_the_batch_size_changes_only_the_rounding(loaded: Backbone) -> None:
    """Gradients are summed over the batches of a step, weighted by their shares."""
    norms = {n: trained(loaded, tiny_config("optimizer.updates=1", f"optimizer.batch={n}"))[1] for n in (5, 12)}
    assert norms[5].loss == pytest.approx(norms[12].loss, rel=1e-4)
    assert norms[5].grad_norm == pytest.approx(norms[12].grad_norm, rel=1e-3)


@pytest.mark.parametrize(("fraction", "expected"), [(0.6, 6), (0.4, 4), (0.69, 6), (1.0, 10), (0.05, 1)])
def test_a_fraction_of_the_samplers_times_is_trained(fraction: float, expected: int) -> None:
    index, at = training_pairs(24, 10, fraction, torch.Generator().manual_seed(0))
    found = list(zip(index.tolist(), at.tolist(), strict=True))
    assert len(found) == len(set(found)) == 24 * expected
    assert set(Counter(i for i, _ in found).values()) == {expected}
    assert {step for _, step in found} <= set(range(10))


@pytest.mark.parametrize("where", ["advantages", "latents", "conditioning", "the gradient norm is (nan|inf)"])
def test_a_non_finite_value_stops_the_run_before_a_weight_changes(backbone: Backbone, where: str) -> None:
    config = tiny_config("optimizer.updates=1")
    policy, optimizer = make_policy(backbone, config)
    train_on(make_samples(backbone), policy, backbone, optimizer, config, 0)
    before = {name: policy.tensors(name) for name in (CURRENT, OLD)}
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    samples, message = make_samples(backbone), "at iteration 7, update 0"
    bad = {"advantages": samples.advantages, "latents": samples.latents, "conditioning": samples.conditioning["states"]}
    if where in bad:
        bad[where].view(-1)[0] = float("nan")
    else:  # the loss is finite, but the gradient of one weight overflows
        policy.parameters[-1].register_hook(lambda gradient: gradient * float("inf"))
        message = f"{where} {message}"
    with pytest.raises(FloatingPointError, match=message):
        train_on(samples, policy, backbone, optimizer, config, 7)
    assert all(same(policy.tensors(name), before[name]) for name in (CURRENT, OLD))
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments[index][name]) for name, value in state.items())


@pytest.mark.parametrize("name", MINIATURES)
def test_checkpointing_recomputes_blocks_and_changes_nothing_else(name: str) -> None:
    loaded = load_backbone(name)
    blocks = [block for part in loaded.blocks for block in loaded.transformer.get_submodule(part).children()]
    walked: list[int] = []
    for place, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, place=place: walked.extend([place] * torch.is_grad_enabled()))

    def result(checkpointing: str) -> tuple[dict[str, torch.Tensor], UpdateFigures, Counter[int]]:
        walked.clear()
        config = tiny_config(f"optimizer.activation_checkpointing={checkpointing}", "optimizer.updates=1")
        return *trained(loaded, config), Counter(walked)

    weights, logged, passes = result("false")
    assert len(passes) == len(blocks)
    for checkpointing, recomputed in (("1", 1), ("true", len(blocks))):
        again, logged_again, passes_again = result(checkpointing)
        assert same(weights, again)
        assert logged == logged_again
        assert passes_again == {place: count * (1 + (place < recomputed)) for place, count in passes.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_does_not_use_cudnns_attention(backbone: Backbone, checkpointing: bool) -> None:
    allowed: list[bool] = []

    def seen(*_: Any) -> None:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())

    config = tiny_config(f"optimizer.activation_checkpointing={checkpointing}")
    policy, optimizer = make_policy(backbone, config)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    blocks = [block for name in backbone.blocks for block in backbone.transformer.get_submodule(name).children()]
    for block in blocks:
        block.register_forward_pre_hook(seen)
    samples = make_samples(backbone)
    allowed.clear()
    train_on(samples, policy, backbone, optimizer, config, 0)
    assert len(allowed) > 0
    assert not any(allowed)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("name", MINIATURES)
def test_gradients_on_a_gpu_equal_those_on_a_cpu(name: str) -> None:
    norms = []
    for device in ("cpu", "cuda"):
        backbone = load_backbone(name, device=device)
        config = tiny_config()
        policy, optimizer = make_policy(backbone, config)
        samples = make_samples(backbone, seed=8)  # With those of seed 7, rounding moves mini-sana's norm by a tenth.
        norms.append(train_on(samples, policy, backbone, optimizer, config, 0).grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


@pytest.mark.parametrize("recipe", ["diffusionnft", "flowgrpo", "dancegrpo"])
@pytest.mark.parametrize(
    ("device", "name"),
    [("cpu", "mini-sana"), *[pytest.param("cuda", name, marks=pytest.mark.gpu) for name in MINIATURES]],
)
def test_a_micro_batch_never_waits_for_the_gpu(device: str, name: str, recipe: str) -> None:
    """On a CPU, only that it runs."""
    backbone = load_backbone(name, device=device)
    overrides = [*TINY, "optimizer.updates=1", "lora.rank=8", "algorithm.timestep_fraction=1"]
    config = resolve(f"{name}/{recipe}/clipscore", overrides=overrides).config
    generator = Generator(backbone, "bf16")  # before the policy adds its layers
    policy, optimizer = make_policy(backbone, config)
    samples, own = make_samples(backbone), updater(policy, backbone, optimizer, config)
    solver = own.algorithm.trains_on.solver("euler", 3, 0, 42)
    drawn = generator.generate(PROMPTS[0], [3, 1, 4, 15], steps=3, solver=solver, record=True)
    samples = replace(samples, recording=drawn.recording)
    own.update(samples, 0)
    sigmas = torch.tensor(own.algorithm.trains_on.sigmas(samples, backbone.sigmas(3)), dtype=torch.float64)
    noise, steps = torch.randn(4, *backbone.latent_shape), torch.tensor([0, 1, 0, 1])
    seen: list[torch.Tensor] = []
    add = lambda *got: seen.extend(got[-1])  # noqa: E731
    for mode in ("default", "error"):  # The first time, kernels are chosen and compiled, which waits.
        if device == "cuda":
            torch.cuda.set_sync_debug_mode(mode)
        try:
            units, fixed = torch.arange(4)[:, None], own.algorithm.fixed
            lanes = own._micro_batch(samples, units, steps, sigmas, noise, 4, fixed, add)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(loss) for loss, _ in lanes)
    assert all(gradient.isfinite().all() for gradient in seen)


def test_a_reference_with_weight_zero_is_not_computed(backbone: Backbone) -> None:
    passes = {}
    for weight in ("0", "1e-4"):
        mine = own_copy(backbone)
        config = tiny_config(f"algorithm.kl_weight={weight}", "optimizer.updates=1")
        policy, optimizer = make_policy(mine, config)
        count: list[int] = []
        policy.transformer.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        train_on(make_samples(mine), policy, mine, optimizer, config, 0)
        passes[weight] = len(count)
    assert passes["1e-4"] == passes["0"] * 2, "the behaviour policy, which equals the current, has no pass of its own"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *(("cpu", name) for name in MINIATURES),
        *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in MINIATURES),
    ],
)
def test_equal_policies_share_a_pass_and_change_no_bit(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results, passes = [], []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(Policy, "is_behaviour", lambda _: False)
        backbone = load_backbone(name, device=device)
        config = tiny_config("algorithm.kl_weight=0", "optimizer.updates=2")
        policy, optimizer = make_policy(backbone, config)
        for parameter in policy.parameters:
            parameter.data += 0.02
        policy.decay_old(0)
        count: list[int] = []
        policy.transformer.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        figures = train_on(make_samples(backbone), policy, backbone, optimizer, config, 0)
        results.append((policy.tensors(CURRENT), figures))
        passes.append(len(count))
    (weights, figures), (separate, separate_figures) = results
    assert same(weights, separate)
    assert figures == separate_figures
    assert passes[0] * 4 == passes[1] * 3, "the first of two optimiser steps saves one of two passes"


@pytest.mark.parametrize("updates", [1, 2])
def test_learning_rates_follow_warm_up_and_half_a_cosine(backbone: Backbone, updates: int) -> None:
    words = (f"optimizer.updates={updates}", "optimizer.learning_rate=0.01", "iterations=6")
    config = tiny_config(*words, "optimizer.warmup_iterations=2", "optimizer.cosine_iterations=all")
    assert config == tiny_config(*words, "optimizer.warmup_iterations=2", "optimizer.cosine_iterations=6")
    short = tiny_config(*words, "iterations=2", "optimizer.warmup_iterations=2", "optimizer.cosine_iterations=all")
    assert short.optimizer.cosine_iterations == 3, "a run no longer than its warm-up never decays"
    policy, optimizer = make_policy(backbone, config)
    samples, rates = make_samples(backbone), []
    for iteration in range(6):
        train_on(samples, policy, backbone, optimizer, config, iteration)
        rates.append(optimizer.param_groups[0]["lr"])
    factors = np.array([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])
    assert rates == pytest.approx([0.005, 0.01, *(0.01 * factors)])
    steep = tiny_config(*words, "optimizer.cosine_iterations=4", "optimizer.cosine_power=2", "iterations=4").optimizer
    assert [steep.rate(iteration) for iteration in range(4)] == pytest.approx(0.01 * factors**2)


@pytest.mark.parametrize("updates", [1, 2])
def test_beta_moves_to_its_end_by_a_constant_factor(loaded: Backbone, updates: int) -> None:
    moving = ("algorithm.beta=0.04", "algorithm.beta_end=1.0", "algorithm.beta_iterations=4")
    for iteration, beta in ((0, 0.04), (2, 0.2), (4, 1.0), (9, 1.0)):
        weights, logged = trained(loaded, tiny_config(f"optimizer.updates={updates}", *moving), iteration)
        constant = tiny_config(f"optimizer.updates={updates}", f"algorithm.beta={beta}")
        expected, expected_log = trained(loaded, constant, iteration)
        assert logged.loss == pytest.approx(expected_log.loss)
        assert all(torch.allclose(weights[key], value, atol=1e-7) for key, value in expected.items())


@pytest.mark.parametrize("words", [("iterations=7",), ("iterations=3", "optimizer.warmup_iterations=6")])
def test_a_rate_that_would_be_zero_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="cosine_iterations is 6; expected at least 7, because"):
        tiny_config(*words, "optimizer.cosine_iterations=6")
