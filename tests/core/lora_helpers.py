"""Random adapters, models that PEFT adapts, and a private copy of a backbone to modify."""

import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.families import Backbone
from solrl_core.lora import adapter_layout
from tests.support import adapters


def own_copy(backbone: Backbone) -> Backbone:
    """The same backbone around its own copy of the transformer."""
    mine = copy.copy(backbone)
    mine.transformer = copy.deepcopy(backbone.transformer)
    return mine


def random_adapter(backbone: Backbone, seed: int, size: float = 0.1, rank: int = 4, alpha: float = 8.0) -> Adapter:
    """An adapter that changes every target."""
    return adapters.random_adapter(adapter_layout(backbone.transformer, backbone.lora_targets), seed, size, rank, alpha)


def with_peft(backbone: Backbone, adapter: Adapter) -> PeftModel:
    """PEFT's unmerged model of the adapter, by PEFT's own names."""
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=backbone.lora_targets)  # type: ignore[arg-type, unused-ignore]
    model = get_peft_model(copy.deepcopy(backbone.transformer), config)
    for key, tensor in adapter.tensors.items():
        head, _, tail = key.rpartition(".")
        model.get_parameter(f"{head}.default.{tail}").data.copy_(tensor)
    return model


def with_value(adapter: Adapter, module: str, value: float) -> Adapter:
    """Copy of an adapter that adds `value` to every weight of `module`."""
    tensors = dict(adapter.tensors)
    a, b = torch.zeros_like(tensors[lora_a_key(module)]), torch.zeros_like(tensors[lora_b_key(module)])
    a[0], b[:, 0] = 1 / adapter.scale, value
    tensors |= {lora_a_key(module): a, lora_b_key(module): b}
    return Adapter(rank=adapter.rank, alpha=adapter.alpha, tensors=tensors)
