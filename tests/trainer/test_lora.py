"""LoRA layers equal PEFT's bit for bit on a CPU, and approximately in BF16."""

import warnings

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from solrl_core.families import Backbone, load_backbone
from solrl_trainer.policy.lora import LoraLinear, LoraWeights
from solrl_trainer.policy.lora_product import lora_product
from solrl_trainer.policy.policy import CURRENT, Policy
from solrl_trainer.settings.training_sections import Lora
from tests.core.lora_helpers import own_copy
from tests.trainer.training_helpers import velocity
from torch import nn

LORA = Lora(rank=4, alpha=8)


def with_peft(backbone: Backbone, seed: int) -> dict[str, nn.Parameter]:
    """Inject PEFT's layers with a policy's settings; returns their weights by PEFT's keys."""
    config = LoraConfig(
        r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=backbone.lora_targets, init_lora_weights="gaussian"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        inject_adapter_in_model(config, backbone.transformer, adapter_name="current")
    return {
        f"base_model.model.{name.replace('.current', '')}": weight
        for name, weight in backbone.transformer.named_parameters()
        if "lora" in name
    }


@pytest.mark.parametrize("name", ["mini-sana", "mini-sd3", "mini-flux"])
def test_initial_weights_velocities_and_gradients_equal_pefts_bit_for_bit(name: str) -> None:
    backbone = load_backbone(name)
    theirs = own_copy(backbone)
    weights = with_peft(theirs, seed=5)
    policy = Policy(backbone, LORA, seed=5)
    own = policy.tensors(CURRENT)
    assert own.keys() == weights.keys()
    assert all(torch.equal(own[key], weight) for key, weight in weights.items())
    generator = torch.Generator().manual_seed(1)
    moved = {key: weight + 0.05 * torch.randn(weight.shape, generator=generator) for key, weight in own.items()}
    policy.restore(CURRENT, moved)
    with torch.no_grad():
        for key, weight in weights.items():
            weight.copy_(moved[key])
    ours, expected = velocity(backbone, policy), velocity(theirs)
    assert torch.equal(ours, expected)
    found = torch.autograd.grad(ours.square().mean(), policy.parameters)
    wanted = torch.autograd.grad(expected.square().mean(), [weights[key] for key in own])
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def group(dtype: torch.dtype, bias: bool = True) -> tuple[list[LoraLinear], torch.Tensor]:
    torch.manual_seed(0)
    layers = []
    for size in (24, 16, 24):
        base = nn.Linear(32, size, bias=bias, dtype=dtype).requires_grad_(False)
        layer = LoraLinear(base, rank=4, alpha=8)
        nn.init.normal_(layer.lora_B, std=0.3)
        layers.append(layer)
    return layers, torch.randn(2, 5, 32, dtype=dtype, requires_grad=True)


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


@pytest.mark.parametrize("bias", [True, False])
def test_products_in_bf16_equal_those_in_float64_up_to_rounding(bias: bool) -> None:
    layers, x = group(torch.bfloat16, bias)
    weights = [weight for layer in layers for weight in layer.current]
    outputs = LoraLinear.together(layers, x)
    upstream = [torch.randn(y.shape).bfloat16() for y in outputs]
    found = [*outputs, *torch.autograd.grad(outputs, [x, *weights], upstream)]

    wide = [weight.detach().double().requires_grad_() for weight in weights]
    x64 = x.detach().double().requires_grad_()
    true = []
    for layer, a, b in zip(layers, wide[::2], wide[1::2], strict=True):
        y = x64 @ layer.base.weight.double().T + 2 * (x64 @ a.T) @ b.T
        true.append(y + layer.base.bias.double() if bias else y)
    true += torch.autograd.grad(true, [x64, *wide], [g.double() for g in upstream])
    assert [y.dtype for y in found] == [torch.bfloat16] * 4 + [torch.float32] * 6
    assert all(distance(y, z) < 0.01 for y, z in zip(found, true, strict=True))


def test_layers_give_the_same_products_together_and_alone_and_no_other_gradient() -> None:
    layers, x = group(torch.bfloat16)
    plain = nn.Linear(32, 8, dtype=torch.bfloat16).requires_grad_(False)
    together = LoraLinear.together([layers[0], plain, *layers[1:]], x)
    alone = [layers[0](x), plain(x), layers[1](x), layers[2](x)]
    assert all(torch.equal(y, z) for y, z in zip(together, alone, strict=True))
    a, b = layers[0].current
    out = lora_product(x.detach()[0], [layers[0].base.weight], [], [a], [b], 2.0)[0]
    of_a, of_b = torch.autograd.grad(out.sum(), [a, b])
    assert of_a.shape == a.shape
    assert of_b.shape == b.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_active_adapter_is_added(dtype: torch.dtype) -> None:
    layers, x = group(dtype)
    current = LoraLinear.together(layers, x)
    for layer in layers:
        layer.active = layer.old  # still B = 0
    assert all(torch.equal(y, layer.base(x)) for y, layer in zip(LoraLinear.together(layers, x), layers, strict=True))
    assert all(distance(y, layer.base(x)) > 0.05 for y, layer in zip(current, layers, strict=True))
    for layer in layers:
        layer.active = None
    assert all(torch.equal(y, layer.base(x)) for y, layer in zip(LoraLinear.together(layers, x), layers, strict=True))


def test_both_adapters_share_one_compiled_graph() -> None:
    layers, x = group(torch.bfloat16)
    for layer in layers:
        layer.old = LoraWeights(*(nn.Parameter(weight.detach().clone()) for weight in layer.current))
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(1)
        return graph

    run = torch.compile(lambda x: layers[0](x), backend=counting, fullgraph=True)
    current = run(x)
    layers[0].active = layers[0].old
    assert torch.equal(run(x), current)
    assert len(graphs) == 1
