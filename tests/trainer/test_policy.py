"""Three policies on one transformer: their velocities, and the updates of their weights."""

import pytest
import torch
from solrl_core.adapter import decode_adapter, encode_adapter
from solrl_core.families import Backbone, load_backbone
from solrl_core.lora import adapter_layout
from solrl_core.sampling.generator import Generator
from solrl_trainer.policy.policy import CURRENT, OLD, Policy, old_decay
from solrl_trainer.settings.training_sections import Lora, PolicySettings
from tests.trainer.training_helpers import same, velocity

LORA = Lora(rank=2, alpha=4)


@pytest.fixture
def policy(backbone: Backbone) -> Policy:
    return Policy(backbone, LORA, seed=5)


def move(policy: Policy, size: float = 0.05, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters:
            weight.add_(size * torch.randn(weight.shape, generator=generator).to(weight.device))


def test_only_the_current_policy_leaves_the_base(loaded: Backbone, backbone: Backbone, policy: Policy) -> None:
    base = velocity(loaded)
    assert torch.equal(velocity(backbone, policy), base)
    assert same(policy.tensors(CURRENT), policy.tensors(OLD))
    assert same(policy.tensors(CURRENT), policy.averaged)
    for step in (False, True):
        if step:
            move(policy)
        with policy.old():
            assert torch.equal(velocity(backbone, policy), base)
        with policy.reference():
            assert torch.equal(velocity(backbone, policy), base)
    assert not torch.allclose(velocity(backbone, policy), base, atol=1e-3)


def test_decays_count_iterations(policy: Policy) -> None:
    settings = PolicySettings(decay_rate=0.1, decay_max=0.9)
    old, average = ({key: value.double() for key, value in policy.tensors(name).items()} for name in (OLD, CURRENT))

    def followed(weights: dict[str, torch.Tensor], decay: float) -> dict[str, torch.Tensor]:
        current = policy.tensors(CURRENT)
        return {key: decay * value + (1 - decay) * current[key].double() for key, value in weights.items()}

    for iteration in range(3):
        move(policy, seed=iteration)
        policy.decay_and_average(iteration, settings)
        old = followed(old, 0.1 * (iteration + 1))
        average = followed(average, (1 + iteration) / (10 + iteration))
    for found, expected in ((policy.tensors(OLD), old), (policy.averaged, average)):
        assert all(torch.allclose(found[key], value.float(), atol=1e-6) for key, value in expected.items())


def test_decay_type_2_of_diffusionnft_is_flat_then_rises_to_its_maximum() -> None:
    settings = PolicySettings(decay_flat=37, decay_rate=0.015, decay_max=0.999)
    decays = {1: 0.0, 37: 0.0, 38: 0.015, 67: 0.45, 103: 0.99, 104: 0.999, 500: 0.999}
    assert {count: old_decay(count, settings) for count in decays} == pytest.approx(decays)


def test_only_the_current_weights_are_trained(backbone: Backbone, policy: Policy, loaded: Backbone) -> None:
    def trained() -> set[int]:
        return {id(p) for p in policy.transformer.parameters() if p.requires_grad}

    wanted = {id(p) for p in policy.parameters}
    assert trained() == wanted
    for within in (policy.old, policy.reference):
        with within():
            assert not torch.is_grad_enabled()
            assert not velocity(backbone, policy).requires_grad
        assert torch.is_grad_enabled()
        assert trained() == wanted
    with policy.reference(), policy.old():
        pass
    assert trained() == wanted
    move(policy)
    before = velocity(backbone, policy)
    for within in (policy.old, policy.reference):
        with pytest.raises(KeyError), within():
            raise KeyError
        assert torch.equal(velocity(backbone, policy), before)
    assert all(p.requires_grad for p in policy.parameters)


def test_a_gradient_is_clipped_to_a_norm(backbone: Backbone, policy: Policy) -> None:
    move(policy)
    velocity(backbone, policy).square().mean().backward()  # type: ignore[no-untyped-call]
    norm = torch.cat([p.grad.flatten() for p in policy.parameters]).norm()
    assert policy.gradient_norm(float(norm) / 2) == pytest.approx(float(norm), rel=1e-4)
    clipped = torch.cat([p.grad.flatten() for p in policy.parameters]).norm()
    assert float(clipped) == pytest.approx(float(norm) / 2, rel=1e-3)


def test_its_adapter_covers_every_target_and_merges_to_the_trained_policy(loaded: Backbone, backbone: Backbone) -> None:
    generator = Generator(loaded, "bf16")
    policy = Policy(backbone, LORA, seed=5)
    move(policy)
    layout = adapter_layout(loaded.transformer, loaded.lora_targets)
    adapter = decode_adapter(encode_adapter(policy.adapter(policy.tensors(CURRENT))), layout)
    assert (adapter.rank, adapter.alpha) == (2, 4)
    generator.set_adapter(adapter)
    with torch.no_grad():
        trained, base, merged = velocity(backbone, policy), velocity(loaded), velocity(loaded, generator)
    # The merged weight is rounded to BF16, which changes the velocity far less than the adapter does.
    assert float((merged - trained).norm()) < 0.1 * float((trained - base).norm())


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointed", [0, 99])
@pytest.mark.parametrize("name", ["mini-sana", "mini-sd3", "mini-flux"])
def test_equal_adapters_give_equal_velocities_on_a_gpu(name: str, checkpointed: int) -> None:
    """They are equal bit for bit, although only one of the two passes keeps a gradient."""
    backbone = load_backbone(name, device="cuda")
    policy = Policy(backbone, Lora(rank=8, alpha=16), seed=5)
    policy.checkpoint_activations(checkpointed)
    move(policy)
    policy.restore(OLD, policy.tensors(CURRENT))
    current = velocity(backbone, policy)
    with policy.old():
        old = velocity(backbone, policy)
    with policy.reference():
        base = velocity(backbone, policy)
    assert current.requires_grad
    assert not old.requires_grad
    assert torch.equal(current, old)
    assert not torch.allclose(current, base, atol=1e-3)
    move(policy, size=1e-3, seed=1)
    with policy.old():
        assert torch.equal(velocity(backbone, policy), old)
    assert not torch.equal(velocity(backbone, policy), old)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mini-sana", "mini-sd3", "mini-flux"])
def test_gradients_in_bf16_are_close_to_those_in_float32(name: str) -> None:
    gradients = []
    for dtype in (torch.float32, None):
        backbone = load_backbone(name, device="cuda", dtype=dtype)
        policy = Policy(backbone, Lora(rank=8, alpha=16), seed=5)
        move(policy)
        found = torch.autograd.grad(velocity(backbone, policy).square().mean(), policy.parameters)
        gradients.append(torch.cat([part.flatten() for part in found]))
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.1
