"""Generators and policies of a run: the policy that each samples from, and their order of construction."""

import pytest
import torch
from solrl_core.adapter import encode_adapter
from solrl_core.families import Backbone
from solrl_core.sampling.generator import Generator
from solrl_trainer.memory.run_memory import MemoryLayout
from solrl_trainer.rollouts import models as models_module
from solrl_trainer.rollouts.models import Models
from tests.trainer.training_helpers import same, tiny_config


def weights(generator: Generator) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in generator.transformer.state_dict().items()}


def test_generators_have_the_behaviour_policy_after_serving_and_share_unadapted_weights(
    backbone: Backbone,
) -> None:
    models = Models.build(backbone, tiny_config("rollout_url=null", "explore.precision=nvfp4"))
    both = (models.generator, models.explorer)
    assert [generator.precision for generator in both] == ["bf16", "nvfp4"]
    # Generators use the base without the policy.
    assert not any("lora" in name for generator in both for name in generator.transformer.state_dict())
    assert any("lora" in name for name in models.policy.transformer.state_dict())
    assert set(models.generator.layout) == set(models.policy.behaviour().modules)
    bases = [weights(generator) for generator in both]
    random, tensors = torch.Generator().manual_seed(1), models.policy.behaviour().tensors
    noisy = {name: value + 0.1 * torch.randn(value.shape, generator=random) for name, value in tensors.items()}
    models.merge_behaviour(encode_adapter(models.policy.adapter(noisy)), 1)
    behaviours = [weights(generator) for generator in both]
    assert not any(same(behaviour, base) for behaviour, base in zip(behaviours, bases, strict=True))
    with models.serving(None) as generator:
        assert same(weights(generator), bases[0])
        assert same(weights(models.explorer), behaviours[1])
    assert same(weights(models.generator), behaviours[0])
    assert same(weights(models.explorer), behaviours[1])
    # Unadapted weights are stored once.
    held = [
        {weight.data_ptr() for weight in transformer.parameters()}
        for transformer in (models.generator.transformer, models.explorer.transformer, models.policy.transformer)
    ]
    plain = {
        weight.data_ptr()
        for name, weight in models.generator.transformer.named_parameters()
        if not name.endswith(".weight") or name.removesuffix(".weight") not in models.generator.layout
    }
    unquantised = plain & held[1]
    assert plain <= held[2]
    assert unquantised
    assert held[0] - plain
    assert not (held[0] - plain) & (held[1] | held[2])


@pytest.mark.parametrize(("precision", "whole"), [("bf16", []), ("nvfp4", ["nvfp4"])])
def test_a_sharded_base_is_never_placed_whole(
    precision: str, whole: list[str], backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[torch.nn.Module] = []
    monkeypatch.setattr(models_module, "place", lambda transformer, device: placed.append(transformer))
    monkeypatch.setattr(models_module, "find_layout", lambda *_: MemoryLayout(True, False, 0))
    monkeypatch.setattr(models_module, "shard_base", lambda backbone, generator, others, policy, world: world)
    models = Models.build(backbone, tiny_config("rollout_url=null", f"explore.precision={precision}"))
    assert placed == [models.explorer.transformer for _ in whole]
    assert [models.explorer.precision] == (whole or ["bf16"])
