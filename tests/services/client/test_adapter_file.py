"""Adapter files from the LoRA weights of other trainers: the bytes of ours, and refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from solrl_client.adapter_file import adapter_file
from solrl_core.adapter import decode_adapter, encode_adapter
from tests.core.lora_helpers import random_adapter
from torch import nn

LAYOUT = {"blocks.0.to_q": (6, 4), "blocks.1.to_q": (6, 4)}


def peft_weights(**settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with the adapters default and, unless biases are trained, old; and the state of default."""
    blocks = nn.ModuleList([nn.ModuleDict({"to_q": nn.Linear(4, 6)}) for _ in range(2)])
    config = LoraConfig(r=2, lora_alpha=8, target_modules=list(LAYOUT), **settings)
    model = get_peft_model(nn.ModuleDict({"blocks": blocks, "head": nn.Linear(6, 6)}), config)
    if "bias" not in settings:  # of which PEFT takes one adapter alone
        model.add_adapter("old", config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight))
    return model, get_peft_model_state_dict(model)


@pytest.mark.parametrize("as_parameters", [True, False])
@pytest.mark.parametrize("prefix", ["base_model.model.", "transformer.", ""])
def test_pefts_names_are_understood(as_parameters: bool, prefix: str) -> None:
    model, state = peft_weights()
    given = dict(model.named_parameters()) if as_parameters else state
    renamed = {prefix + name.removeprefix("base_model.model."): weight for name, weight in given.items()}
    found = decode_adapter(adapter_file(renamed, list(LAYOUT), rank=2, alpha=8), LAYOUT)
    assert (found.rank, found.alpha) == (2, 8.0)
    assert found.tensors.keys() == state.keys()
    assert all(torch.equal(found.tensors[name], weight) for name, weight in state.items())


def test_one_of_several_adapters_is_written() -> None:
    model, state = peft_weights()
    weights = dict(model.named_parameters())
    old = adapter_file(weights, list(LAYOUT), rank=2, alpha=8, adapter="old")
    assert torch.equal(
        decode_adapter(old, LAYOUT).tensors["base_model.model.blocks.0.to_q.lora_A.weight"],
        weights["base_model.model.blocks.0.to_q.lora_A.old.weight"],
    )
    assert old != adapter_file(state, list(LAYOUT), rank=2, alpha=8)


def test_the_bytes_are_those_of_our_trainer(backbone: Any) -> None:
    ours = random_adapter(backbone, 0, size=0.3)
    assert adapter_file(ours.tensors, ours.modules, rank=ours.rank, alpha=ours.alpha) == encode_adapter(ours)
    arrays = {name: tensor.numpy().astype(np.float64) for name, tensor in ours.tensors.items()}
    assert adapter_file(arrays, ours.modules, rank=ours.rank, alpha=ours.alpha) == encode_adapter(ours)
    halves = {name: tensor.bfloat16() for name, tensor in ours.tensors.items()}
    rounded = decode_adapter(
        adapter_file(halves, ours.modules, rank=ours.rank, alpha=ours.alpha),
        {name: (len(ours.delta(name)), ours.delta(name).shape[1]) for name in ours.modules},
    )
    assert all(torch.equal(rounded.tensors[name], half.float()) for name, half in halves.items())


@pytest.mark.parametrize(
    ("settings", "name", "given"),
    [
        *(
            (settings, name, given)
            for settings, name in (
                ({"use_dora": True}, "blocks.0.to_q.lora_magnitude_vector"),
                ({"lora_bias": True}, r"blocks.0.to_q.lora_B(.default)?.bias"),
                ({"modules_to_save": ["head"]}, r"head(.modules_to_save.default)?.(weight|bias)"),
            )
            for given in ("parameters", "model's state", "adapter's state")
        ),
        # Nothing in the whole model's state says which biases are trained.
        *(
            ({"bias": "lora_only"}, "blocks.0.to_q.base_layer.bias", given)
            for given in ("parameters", "adapter's state")
        ),
    ],
)
def test_what_is_trained_beside_lora_is_refused_by_name(settings: dict[str, Any], name: str, given: str) -> None:
    model, adapters = peft_weights(**settings)
    weights = {"parameters": dict(model.named_parameters()), "model's state": model.state_dict()}.get(given, adapters)
    with pytest.raises(ValueError, match=rf"{name}.* is trained, but is no lora_A or lora_B"):
        adapter_file(weights, list(LAYOUT), rank=2, alpha=8)


def test_a_module_under_two_prefixes_is_refused() -> None:
    _, state = peft_weights()
    state |= {name.replace("base_model.model", "transformer"): weight + 1 for name, weight in state.items()}
    with pytest.raises(
        ValueError, match=r"base_model.*lora_A\.weight and transformer\..*lora_A\.weight are weights of one"
    ):
        adapter_file(state, list(LAYOUT), rank=2, alpha=8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("base_model.model.blocks.1.to_q.lora_B.weight"), "1 of the model's 4 LoRA weights"),
        (lambda state: state.update({"head.lora_A.weight": torch.zeros(2, 4)}), "1 belong to none of its targets"),
        (lambda state: state["base_model.model.blocks.0.to_q.lora_A.weight"].fill_(float("nan")), "not finite"),
        (
            lambda state: state.update({"base_model.model.blocks.0.to_q.lora_B.weight": torch.zeros(6, 3)}),
            r"\[6, 3\]; expected \[out, 2\]",
        ),
        (lambda state: state.clear(), "expected LoRA on exactly the modules in lora_targets"),
    ],
    ids=["missing", "extra", "nan", "rank", "none"],
)
def test_other_weights_are_refused(change: Any, said: str) -> None:
    _, state = peft_weights()
    change(state)
    with pytest.raises(ValueError, match=said):
        adapter_file(state, list(LAYOUT), rank=2, alpha=8)
