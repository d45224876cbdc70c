"""Fused blocks of the families with Qwen's text encoders, compared with diffusers' blocks on whole transformers."""

import copy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from solrl_core.families import load_backbone
from solrl_core.families.base import Conditioning
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.precision import apply_policy, fp8
from tiny_pipelines import PROMPTS, difference
from tiny_qwen import QWEN
from torch import Tensor, nn


class Model(NamedTuple):
    """A tiny model and an input of its transformer."""

    backbone: PipelineBackbone
    latents: Tensor
    rows: Conditioning

    def velocity(self, transformer: nn.Module) -> Tensor:
        """Of two candidates at different noise levels."""
        return self.backbone.velocity(transformer, self.latents, torch.tensor([0.9, 0.2]), self.rows)


@pytest.fixture(scope="module", params=QWEN)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = QWEN[request.param](tmp_path_factory.mktemp("fused") / request.param)
    backbone = load_backbone(str(folder))
    latents = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(0))
    return Model(backbone, latents, backbone.encode(PROMPTS))


def test_a_fused_transformer_equals_diffusers_compiled_or_not(model: Model) -> None:
    plain, fused = (copy.deepcopy(model.backbone.transformer) for _ in range(2))
    model.backbone.fuse(fused)
    x = model.latents.requires_grad_()
    expected = model.velocity(plain)
    gradient = torch.autograd.grad(expected.square().sum(), x)[0]
    for name in model.backbone.blocks:
        for block in fused.get_submodule(name).children():
            assert type(block).__module__.startswith("solrl_core.families")
    for compiled in (False, True):
        if compiled:
            for name in model.backbone.blocks:
                fused.get_submodule(f"{name}.0").compile(backend="aot_eager", fullgraph=True)
        got = model.velocity(fused)
        assert difference(got.detach(), expected.detach()) <= 1e-5
        assert difference(torch.autograd.grad(got.square().sum(), x)[0], gradient) <= 1e-4 * float(gradient.abs().max())


@pytest.mark.usefixtures("fp8_in_float32")
def test_fp8_layers_that_share_an_input_share_its_codes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    quantize_rows = fp8.quantize_rows
    monkeypatch.setattr(fp8, "quantize_rows", lambda x, activation: counts.append(1) or quantize_rows(x, activation))
    with torch.inference_mode():
        exact = model.velocity(model.backbone.transformer)
        plain = copy.deepcopy(model.backbone.transformer)
        apply_policy(plain, model.backbone.fp8_policy, "fp8")
        counts.clear()
        expected, unfused = model.velocity(plain), len(counts)
        model.backbone.fuse(plain)
        counts.clear()
        got = model.velocity(plain)
    assert 0 < len(counts) < unfused / 2
    # Parts that were concatenated have scales of their own now, and float32 sums are in another order.
    assert 0 < torch.linalg.norm(got - exact) < 1.2 * torch.linalg.norm(expected - exact)
