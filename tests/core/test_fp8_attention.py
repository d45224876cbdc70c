"""Attention in FP8: its rounding, and which of Wan's attentions it computes."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from solrl_core.families import load_backbone, wan
from solrl_core.kernels.fp8_attention import QUERIES, fp8_attention
from solrl_core.precision.layer_policy import apply_policy
from solrl_core.sampling.noise import initial_noise
from tests.core.families.tiny_pipelines import PROMPTS, write_wan
from torch import Tensor

pytestmark = pytest.mark.usefixtures("inference")


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads).transpose(1, 2)


def given() -> tuple[Tensor, Tensor, Tensor]:
    """Queries of three blocks, the last one in part; keys of two."""
    return torch.randn(2, 150, 3, 16), torch.randn(2, 203, 3, 16), torch.randn(2, 203, 3, 16)


def test_attention_is_exact_but_for_rounding_and_neither_overflows_nor_loses_digits() -> None:
    query, key, value = given()
    found, expected = fp8_attention(query, key, value), exact(query, key, value)
    assert found.shape == query.shape
    assert 1e-3 < float((found - expected).norm() / expected.norm()) < 0.08
    # With one scale for all, queries a million times smaller than the largest would be zero.
    expected = found[:, QUERIES:]
    query[:, :QUERIES] *= 1e6
    assert torch.equal(fp8_attention(query, key, value)[:, QUERIES:], expected)
    query, key, value = given()
    query[:, 0], key[:, 0] = 1e4, 1e4
    query[:, 1], value[:, :, 0] = 0, 0
    found = fp8_attention(query, key, value)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, 0, 1:], value[:, 0, 1:], rtol=0.07, atol=0.01)
    assert (found[:, :, 0] == 0).all()


@pytest.mark.usefixtures("fp8_in_float32")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_wan_in_fp8_attends_to_clips_in_fp8(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone(str(write_wan(tmp_path / "wan")))
    transformer = copy.deepcopy(backbone.transformer)
    if precision == "fp8":
        apply_policy(transformer, backbone.fp8_policy, "fp8")
    backbone.fuse(transformer)
    lengths = []

    def count(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths.append((query.shape[1], key.shape[1]))
        return exact(query, key, value)

    monkeypatch.setattr(wan, "fp8_attention", count)
    latents, rows = initial_noise([3], backbone.latent_shape), backbone.encode(PROMPTS[:1], 1.0)
    backbone.velocity(transformer, latents, torch.tensor([0.9]), rows, 1.0)
    blocks = len(list(transformer.get_submodule("blocks").children()))
    tokens = latents[0, 0].numel() // backbone.transformer.config.patch_size[1] ** 2
    assert lengths == [(tokens, tokens)] * (blocks if precision == "fp8" else 0)
