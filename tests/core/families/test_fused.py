"""Fused blocks compared with diffusers' blocks on whole transformers, plain, compiled and of FP8 layers."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from solrl_core.precision import apply_policy, fp8
from solrl_core.sampling.noise import initial_noise
from tiny_models import ONE_EACH, Tiny
from tiny_pipelines import PROMPTS, difference
from torch import Tensor, nn

CODES = {"z-image/static": 16, "qwen-image/base": 8, "flux2-klein/base": 12}
"""How many inputs a fused transformer of FP8 layers quantises at most; test_kernels.py counts those of other blocks."""


def velocity_of(tiny: Tiny, prompts: list[str]) -> tuple[Tensor, Callable[[nn.Module], Tensor]]:
    """Latents of two candidates, and a function from a transformer to their velocities at different noise levels."""
    backbone = tiny.backbone
    latents, rows = initial_noise([3, 14], backbone.latent_shape), backbone.encode(prompts)
    return latents, lambda each: backbone.velocity(each, latents, torch.tensor([0.9, 0.2]), rows)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1] * 2], ids=["unequal", "equal"])
@pytest.mark.parametrize("tiny", ["sd3/3", *ONE_EACH], indirect=True)
def test_a_fused_transformer_equals_diffusers_compiled_or_not(tiny: Tiny, prompts: list[str]) -> None:
    backbone = tiny.backbone
    fused = copy.deepcopy(backbone.transformer)
    backbone.fuse(fused)
    assert fused.state_dict().keys() == backbone.transformer.state_dict().keys()
    latents, velocity = velocity_of(tiny, prompts)
    x = latents.requires_grad_()
    expected = velocity(backbone.transformer)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    # test_kernels.py and test_each_family.py compile blocks of the other families.
    compiled = tiny.name in ("qwen-image/base", "flux2-klein/base") and prompts is PROMPTS
    for compile_blocks in (False, True) if compiled else (False,):
        if compile_blocks:
            for name in backbone.blocks:
                fused.get_submodule(f"{name}.0").compile(backend="aot_eager", fullgraph=True)
        got = velocity(fused)
        assert difference(got.detach(), expected.detach()) <= 1e-4 * float(expected.detach().abs().max())
        (found,) = torch.autograd.grad(got.square().sum(), x)
        assert difference(found, gradient) <= 1e-4 * float(gradient.abs().max())


@pytest.mark.parametrize("tiny", ["sana/mini"], indirect=True)
def test_fused_sana_computes_a_text_once_for_all_its_candidates(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = copy.copy(tiny.backbone)
    latents, at = initial_noise(range(3), backbone.latent_shape), torch.tensor([0.9, 0.5, 0.2])
    prompt, other = (backbone.encode([text]) for text in PROMPTS)
    monkeypatch.setattr(backbone, "device", torch.device("cuda"))  # stacks alone, here
    one, several = backbone.stack([prompt] * 3), backbone.stack([prompt, other, prompt])
    monkeypatch.setattr(backbone, "device", torch.device("cpu"))
    assert torch.equal(one["states"], torch.cat([prompt["states"]] * 3))
    assert torch.equal(several["states"][1], other["states"][0])
    fused = copy.deepcopy(backbone.transformer)
    backbone.fuse(fused)
    rows: dict[str, int] = {}
    for name, layer in fused.named_modules():
        if re.fullmatch(r"caption_projection\.linear_1|transformer_blocks\.0\.attn2\.to_[kvq]", name):
            layer.register_forward_pre_hook(
                lambda _, given, name=name: rows.update({name.rpartition(".")[2]: len(given[0])})
            )
    with torch.inference_mode():
        for conditioning, texts in ((one, 1), (several, 3)):
            got = backbone.velocity(fused, latents, at, conditioning)
            expected = backbone.velocity(backbone.transformer, latents, at, conditioning)
            assert difference(got, expected) <= 1e-4 * float(expected.abs().max())
            assert rows == {"linear_1": texts, "to_k": texts, "to_v": texts, "to_q": 3}


@pytest.mark.usefixtures("fp8_in_float32")
@pytest.mark.parametrize("tiny", ONE_EACH, indirect=True)
def test_fp8_layers_that_share_an_input_share_its_codes(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    quantize_rows = fp8.quantize_rows
    monkeypatch.setattr(fp8, "quantize_rows", lambda x, activation: counts.append(1) or quantize_rows(x, activation))
    _, velocity = velocity_of(tiny, PROMPTS)
    with torch.inference_mode():
        exact = velocity(tiny.backbone.transformer)
        layers = copy.deepcopy(tiny.backbone.transformer)
        apply_policy(layers, tiny.backbone.fp8_policy, "fp8")
        counts.clear()
        expected, unfused = velocity(layers), len(counts)
        tiny.backbone.fuse(layers)
        counts.clear()
        got = velocity(layers)
    assert 0 < len(counts) <= CODES.get(tiny.name, unfused - 1) < unfused
    # Parts that were concatenated have scales of their own now, and float32 sums are in another order.
    off = torch.linalg.norm(expected - exact)
    assert off > 0.002 * torch.linalg.norm(exact)
    assert 0 < torch.linalg.norm(got - exact) < 1.2 * off
