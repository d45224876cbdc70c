"""Generators and policies of a run: the policy that each samples from, and their order of construction."""

import pytest
import torch
from solrl_core.adapter import encode_adapter
from solrl_core.families import Backbone
from solrl_trainer.models import Models
from training_helpers import tiny_config


@pytest.fixture
def models(backbone: Backbone) -> Models:
    return Models.build(backbone, tiny_config(), note=print)


def changed(models: Models, seed: int) -> bytes:
    """A behaviour policy that differs from the base."""
    generator = torch.Generator().manual_seed(seed)
    tensors = models.policy.behaviour().tensors
    noisy = {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in tensors.items()}
    return encode_adapter(models.policy.adapter(noisy))


def weights(generator: object) -> list[torch.Tensor]:
    return [value.clone() for value in generator.transformer.state_dict().values()]  # type: ignore[attr-defined]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(value, wanted) for value, wanted in zip(one, other, strict=True))


def test_the_behaviour_policy_is_merged_again_after_another_was_served(models: Models) -> None:
    base = weights(models.generator)
    models.merge_behaviour(changed(models, 1))
    behaviour = weights(models.generator)
    assert not same(behaviour, base)
    with models.serving(None) as generator:
        assert same(weights(generator), base)
    assert same(weights(models.generator), behaviour)
    with pytest.raises(KeyboardInterrupt), models.serving(models.policy.average_adapter()):
        raise KeyboardInterrupt
    assert same(weights(models.generator), behaviour)


def test_a_generator_of_another_precision_keeps_the_behaviour_policy_meanwhile(backbone: Backbone) -> None:
    models = Models.build(backbone, tiny_config(), precision="nvfp4", note=print)
    assert (models.generator.precision, models.behaviour.precision) == ("bf16", "nvfp4")
    base = weights(models.generator)
    models.merge_behaviour(changed(models, 1))
    behaviour = weights(models.behaviour)
    assert same(weights(models.generator), base)
    with models.serving(None):
        assert same(weights(models.behaviour), behaviour)
    assert same(weights(models.behaviour), behaviour)


def test_generators_bind_the_base_and_not_the_policy(models: Models) -> None:
    assert not any("lora" in name for name in models.generator.transformer.state_dict())
    assert any("lora" in name for name in models.policy.transformer.state_dict())
    assert set(models.generator.layout) == set(models.policy.behaviour().modules)
