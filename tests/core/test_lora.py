"""LoRA: the modules that an adapter adapts, and merging."""

import copy

import pytest
import torch
from lora_helpers import random_adapter
from peft import LoraConfig, inject_adapter_in_model
from solrl_core.adapter import Adapter
from solrl_core.families import Backbone
from solrl_core.lora import Merger, adapter_layout, target_modules
from solrl_core.precision import QuantLinear, apply_policy, quantize_dequantize
from torch import nn


def test_the_targets_are_those_peft_would_adapt(backbone: Backbone) -> None:
    adapted = inject_adapter_in_model(
        LoraConfig(r=2, target_modules=backbone.lora_targets), copy.deepcopy(backbone.transformer)
    )
    end = ".lora_A.default"
    names = {name.removesuffix(end) for name, _ in adapted.named_modules() if name.endswith(end)}
    assert names == set(adapter_layout(backbone.transformer, backbone.lora_targets))


def test_the_whole_name_must_match() -> None:
    model = nn.ModuleDict({"to_q": nn.Linear(3, 5), "to_q_extra": nn.Linear(3, 5), "norm": nn.LayerNorm(3)})
    assert adapter_layout(model, "to_q") == {"to_q": (5, 3)}
    assert adapter_layout(model, "to_q.*") == {"to_q": (5, 3), "to_q_extra": (5, 3)}


@pytest.mark.parametrize("targets", ["nowhere", "norm"])
def test_a_pattern_without_a_linear_layer_is_refused(targets: str) -> None:
    with pytest.raises(ValueError, match=f"'{targets}' matches no linear layer of ModuleDict"):
        target_modules(nn.ModuleDict({"norm": nn.LayerNorm(3), "to_q": nn.Linear(3, 5)}), targets)


def merged(backbone: Backbone, served: nn.Module, adapter: Adapter | None) -> dict[str, torch.Tensor]:
    """The targets' weights in `served` after merging."""
    names = target_modules(backbone.transformer, backbone.lora_targets)
    Merger(names, served).merge(adapter)
    return {name: served.get_submodule(name).weight.detach().clone() for name in names}  # type: ignore[union-attr, operator]


def by_peft(backbone: Backbone, adapter: Adapter) -> dict[str, torch.Tensor]:
    """Float32 weights of the targets as PEFT merges them."""
    model = copy.deepcopy(backbone.transformer)
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=backbone.lora_targets)  # type: ignore[arg-type, unused-ignore]
    inject_adapter_in_model(config, model)
    for key, tensor in adapter.tensors.items():
        name = key.removeprefix("base_model.model.").replace(".lora_A.", ".lora_A.default.")
        model.get_parameter(name.replace(".lora_B.", ".lora_B.default.")).data.copy_(tensor)
    weights = {}
    for name in target_modules(backbone.transformer, backbone.lora_targets):
        layer = model.get_submodule(name)
        layer.merge()  # type: ignore[operator]
        weights[name] = layer.weight.detach().float()  # type: ignore[union-attr, operator]
    return weights


def test_merging_sums_in_float32_as_peft_does_and_rounds_once(backbone: Backbone) -> None:
    adapter = random_adapter(backbone, 0)
    ours = merged(backbone, copy.deepcopy(backbone.transformer), adapter)
    theirs = by_peft(backbone, adapter)
    clean = target_modules(backbone.transformer, backbone.lora_targets)
    for name, weight in ours.items():
        assert torch.equal(weight, weight.bfloat16().float())
        # Half a unit in the last of BF16's 8 bits, and a little for another order of summation.
        assert (weight - theirs[name]).abs().le(theirs[name].abs() * 2**-8 * 1.01 + 1e-7).all(), name
        assert not torch.equal(weight, clean[name].weight)


def test_a_small_change_is_not_lost_before_the_rounding(backbone: Backbone) -> None:
    """Rounding the delta to BF16, or adding in BF16, would give other weights than rounding the float32 sum."""
    adapter = random_adapter(backbone, 0, size=0.03)
    ours = merged(backbone, copy.deepcopy(backbone.transformer), adapter)
    theirs = by_peft(backbone, adapter)
    same = sum(int((weight == theirs[name].bfloat16().float()).sum()) for name, weight in ours.items())
    assert same >= 0.9999 * sum(weight.numel() for weight in ours.values())


def test_quantised_layers_requantise_the_float32_sum_in_place(backbone: Backbone) -> None:
    served = copy.deepcopy(backbone.transformer)
    apply_policy(served, backbone.policy)
    targets = {name: served.get_submodule(name) for name in target_modules(backbone.transformer, backbone.lora_targets)}
    held = {name: module for name, module in targets.items() if isinstance(module, QuantLinear)}
    assert len(held) > len(targets) / 2
    storage = {name: module.weight.data_ptr() for name, module in held.items()}
    adapter = random_adapter(backbone, 0)
    ours = merged(backbone, served, adapter)
    theirs = by_peft(backbone, adapter)
    for name, module in held.items():
        assert module.weight.data_ptr() == storage[name]
        expected = quantize_dequantize(theirs[name])
        assert ((ours[name] - expected).abs() < 1e-5 * expected.abs().max()).float().mean() > 0.999
