"""An adapter beside quantised weights: its change survives where merging rounds it away."""

import pytest
import torch
from lora_helpers import random_adapter
from solrl_core.adapter import Adapter
from solrl_core.families import Backbone, load_backbone
from solrl_core.precision import LowRank, QuantLinear, quantize_dequantize
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.noise import initial_noise
from solrl_proto.rollouts import AdapterUse
from torch import Tensor, nn

SEEDS = [3, 14, 159]


@pytest.fixture(scope="module")
def on_grid() -> Backbone:
    """A miniature whose quantised weights lie on the NVFP4 grid."""
    return load_backbone("mini-sd3")


@pytest.fixture(scope="module")
def small(on_grid: Backbone) -> Adapter:
    """A small change of every target."""
    return random_adapter(on_grid, 0, size=0.02)


def velocity(generator: Generator) -> Tensor:
    backbone = generator.backbone
    x, at = initial_noise(SEEDS, backbone.latent_shape), torch.tensor([1.0, 0.5, 0.1])
    with torch.no_grad():
        found: Tensor = backbone.velocity(generator.transformer, x, at, backbone.encode(["a red circle"] * 3))
    return found


@torch.no_grad()
def lost(generator: Generator, adapter: Adapter, use: AdapterUse) -> float:
    """Part of the adapter's product that the quantised layers' outputs lack: 0 if none, 1 if all."""
    wanted, found = [], []
    for name in generator.layout:
        layer = generator.transformer.get_submodule(name)
        if isinstance(layer, QuantLinear):
            x = torch.randn(4, 16, layer.in_features, generator=torch.Generator().manual_seed(1))
            generator.set_adapter(None)
            base = layer(x)
            generator.set_adapter(adapter, use)
            found.append((layer(x) - base).flatten())
            wanted.append((x @ adapter.delta(name).T).flatten())
    return float((torch.cat(found) - torch.cat(wanted)).norm() / torch.cat(wanted).norm())


@torch.no_grad()
def test_a_layer_adds_the_product_to_its_output() -> None:
    layer = QuantLinear.from_linear(nn.Linear(32, 8))
    x, a, b = torch.randn(3, 5, 32), torch.randn(2, 32).bfloat16(), torch.randn(8, 2).bfloat16()
    alone = layer(x)
    layer.unmerged = LowRank(a, b)
    torch.testing.assert_close(layer(x), alone + x @ a.float().T @ b.float().T)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_a_small_change_survives_unmerged_on_the_grid(on_grid: Backbone, small: Adapter) -> None:
    nvfp4 = Generator(on_grid, "nvfp4")
    assert lost(nvfp4, small, "unmerged") < 0.01
    assert lost(nvfp4, small, "merged") > 0.8


def test_quantised_weights_remain_the_bases_and_others_are_merged(on_grid: Backbone, small: Adapter) -> None:
    nvfp4, exact = Generator(on_grid, "nvfp4"), Generator(on_grid, "bf16")
    exact.set_adapter(small)
    nvfp4.set_adapter(small, "unmerged")
    kinds = set()
    for name in nvfp4.layout:
        layer = nvfp4.transformer.get_submodule(name)
        kinds.add(type(layer))
        if isinstance(layer, QuantLinear):
            assert torch.equal(layer.weight, quantize_dequantize(on_grid.transformer.get_submodule(name).weight))
        else:
            assert torch.equal(layer.weight, exact.transformer.get_submodule(name).weight)
    assert kinds == {nn.Linear, QuantLinear}


def test_the_base_and_a_merged_adapter_come_back_bit_for_bit(on_grid: Backbone, small: Adapter) -> None:
    nvfp4, fresh = Generator(on_grid, "nvfp4"), Generator(on_grid, "nvfp4")
    base = velocity(nvfp4)
    fresh.set_adapter(small)
    nvfp4.set_adapter(small, "unmerged")
    assert not torch.equal(velocity(nvfp4), velocity(fresh))
    nvfp4.set_adapter(small)
    assert torch.equal(velocity(nvfp4), velocity(fresh))
    nvfp4.set_adapter(small, "unmerged")
    nvfp4.set_adapter(None)
    assert torch.equal(velocity(nvfp4), base)


def test_candidates_of_an_unmerged_adapter_do_not_depend_on_their_batch(on_grid: Backbone, small: Adapter) -> None:
    nvfp4 = Generator(on_grid, "nvfp4")
    nvfp4.set_adapter(small, "unmerged")
    together = nvfp4.generate("a red circle", range(12), steps=2, decode=False).latents
    apart = [nvfp4.generate("a red circle", part, steps=2, decode=False).latents for part in (range(5), range(5, 12))]
    assert torch.equal(together, torch.cat(apart))
