"""Fused blocks compared with diffusers' blocks on whole transformers, plain, compiled and of FP8 layers."""

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from solrl_core.precision import fp8, fuse
from solrl_core.precision.layer_policy import apply_policy
from solrl_core.sampling.noise import initial_noise
from tests.core.families.tiny_models import ONE_EACH, Tiny
from tests.core.families.tiny_pipelines import PROMPTS, difference
from torch import Tensor, nn

CODES = {
    **{"sana/mini": (0, 0, 35), "sd3/3.5": (5, 3, 7), "flux/dev": (7, 4, 14), "z-image/static": (0, 0, 16)},
    **{"qwen-image/base": (4, 4, 8), "flux2-klein/base": (6, 4, 12), "wan/2.1": (4, 0, 10)},
}
"""How many inputs a fused transformer of FP8 layers quantises after a norm, after a sum and a norm, and alone."""


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
    # Blocks of the other families are compiled with FP8 layers, below and in test_each_family.py.
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
                lambda _, given, name=name: rows.update({name.split(".")[-1]: len(given[0])})
            )
    with torch.inference_mode():
        for conditioning, texts in ((one, 1), (several, 3)):
            got = backbone.velocity(fused, latents, at, conditioning)
            expected = backbone.velocity(backbone.transformer, latents, at, conditioning)
            assert difference(got, expected) <= 1e-4 * float(expected.abs().max())
            assert rows == {"linear_1": texts, "to_k": texts, "to_v": texts, "to_q": 3}


@pytest.mark.usefixtures("fp8_in_float32")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("tiny", ONE_EACH, indirect=True)
def test_fp8_layers_that_share_an_input_share_codes(tiny: Tiny, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    names = ("norm_modulate_quantize", "add_norm_modulate_quantize", "quantize_rows")
    for module, name in zip((fuse, fuse, fp8), names, strict=True):
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, name=name, call=call: counts.update([name]) or call(*x))
    _, velocity = velocity_of(tiny, PROMPTS)
    with torch.inference_mode():
        exact = velocity(tiny.backbone.transformer)
        layers = copy.deepcopy(tiny.backbone.transformer)
        policy = tiny.backbone.fp8_policy
        apply_policy(layers, replace(policy, keep=(*policy.keep, "to_k", "to_out")) if mixed else policy, "fp8")
        counts.clear()
        expected, unfused = velocity(layers), counts.total()
        tiny.backbone.fuse(layers)
        counts.clear()
        got = velocity(layers)
        if not mixed:
            assert tuple(counts[name] for name in names) == CODES[tiny.name]
            assert sum(CODES[tiny.name]) < unfused
        if tiny.name in ("flux/dev", "sd3/3.5") and not mixed:
            for name in tiny.backbone.blocks:
                layers.get_submodule(f"{name}.0").compile(backend="aot_eager", fullgraph=True)
            assert difference(velocity(layers), got) <= 1e-4 * float(got.abs().max())
    # Parts that were concatenated have scales of their own now, and float32 sums are in another order.
    off = torch.linalg.norm(expected - exact)
    assert off > 0.002 * torch.linalg.norm(exact)
    assert torch.linalg.norm(got - expected) < 0.6 * off
    assert torch.linalg.norm(got - exact) < 1.2 * off
