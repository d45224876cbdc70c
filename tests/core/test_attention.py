"""Attention without a running maximum, and in FP8: their arithmetic, the bound that allows one, and the choice."""

import copy
import math
from pathlib import Path

import pytest
import torch
from diffusers.models.attention import JointTransformerBlock
from solrl_core.families import load_backbone, wan
from solrl_core.families.sd3 import Sd3FusedBlock
from solrl_core.kernels import attention, bounded_attention
from solrl_core.kernels.attention import attend
from solrl_core.kernels.bounded_attention import LARGEST_LOGIT, are_bounded, logit_bound, plain_bounded_attention
from solrl_core.kernels.fp8_attention import QUERIES, fp8_attention
from solrl_core.precision.layer_policy import apply_policy
from solrl_core.sampling.noise import initial_noise
from tests.core.families.tiny_pipelines import PROMPTS, write_wan
from tests.core.gpu_marks import relative, torchs_attention
from torch import Tensor, nn

HEADS, SIZE = 3, 16


pytestmark = pytest.mark.usefixtures("inference")


def sd3_block(largest: float = 2.0, dual: bool = False, qk_norm: str | None = "rms_norm") -> JointTransformerBlock:
    """SD3's block whose norms have random weights of very different sizes, up to `largest`."""
    block = JointTransformerBlock(HEADS * SIZE, HEADS, SIZE, False, qk_norm, dual)
    for name, norm in block.named_modules():
        if name.endswith(("norm_q", "norm_k", "norm_added_q", "norm_added_k")):
            norm.weight.copy_(largest * torch.rand(()) * torch.rand(SIZE))
    return block


def test_attention_without_a_maximum_is_torchs_and_the_bound_is_the_largest_logit() -> None:
    query, key, value = torch.randn(3, 2, 25, HEADS, SIZE)
    torch.testing.assert_close(plain_bounded_attention(query, key, value), torchs_attention(query, key, value))
    attn = sd3_block().attn
    query_norms, key_norms = [attn.norm_q, attn.norm_added_q], [attn.norm_k, attn.norm_added_k]
    # A vector along one channel keeps its whole length there, which gives the largest logits.
    given = torch.cat([torch.eye(SIZE), query.flatten(0, 2)])
    queries, keys = (torch.cat([norm(given) for norm in norms]) for norms in (query_norms, key_norms))
    largest = float((queries @ keys.mT).abs().max()) / math.sqrt(SIZE)
    bound = logit_bound(*([norm.weight for norm in norms] for norms in (query_norms, key_norms)))
    assert largest <= bound <= 1.021 * largest


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_logits_neither_overflow_nor_underflow(sign: int) -> None:
    query = torch.full((1, 1, 1, 64), math.sqrt(LARGEST_LOGIT / 8))
    value = torch.randn(1, 4301, 1, 64) * 100
    attended = plain_bounded_attention(query, sign * query.expand(1, 4301, 1, 64), value)
    torch.testing.assert_close(attended[0, 0, 0], value.mean(1)[0, 0], atol=1e-3, rtol=1e-3)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the queries that attention without a maximum gets from now on, with a kernel for any device."""
    shapes: list[torch.Size] = []

    def count(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shapes.append(query.shape)
        return plain_bounded_attention(query, key, value)

    monkeypatch.setattr(attention, "bounded_attention", count)
    monkeypatch.setattr(bounded_attention, "has_descriptors", lambda device: True)
    return shapes


def given_in_bf16() -> list[Tensor]:
    return [torch.randn(2, *tokens, 48).bfloat16() for tokens in ((25,), (7,), ())]


@pytest.mark.parametrize("dual", [False, True])
def test_a_block_of_small_norms_attends_without_a_maximum(dual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, block, given = counted(monkeypatch), sd3_block(dual=dual).bfloat16(), given_in_bf16()
    for mine, theirs in zip(Sd3FusedBlock(copy.deepcopy(block))(*given), block(*given), strict=True):
        assert relative(mine, theirs) < 0.02
    assert shapes == [(2, 32, HEADS, SIZE), *[(2, 25, HEADS, SIZE)] * dual]


@pytest.mark.parametrize("norm", ["norm_q", "norm_added_q"])
def test_one_large_norm_of_image_or_text_keeps_the_maximum(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = counted(monkeypatch)
    block = sd3_block().bfloat16()
    weight = block.attn.get_submodule(norm).weight
    weight[3] = 1
    for key in (block.attn.norm_k, block.attn.norm_added_k):
        key.weight[3] = 1
    given = given_in_bf16()
    for largest, calls in ((LARGEST_LOGIT / 4.2, 1), (LARGEST_LOGIT / 4, 0), (torch.nan, 0)):
        shapes.clear()
        weight[3] = largest
        Sd3FusedBlock(copy.deepcopy(block))(*given)
        assert len(shapes) == calls, largest


def test_heads_without_rms_norms_or_a_kernel_keep_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Sd3FusedBlock(sd3_block(dual=True))
    assert (block.bounded, block.second_bounded) == (False, False)
    with torch.device("meta"):
        assert not Sd3FusedBlock(JointTransformerBlock(HEADS * SIZE, HEADS, SIZE, False, "rms_norm")).bounded
    counted(monkeypatch)
    rms, layer = nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)
    assert are_bounded([rms], [rms])
    for other in (None, layer, nn.RMSNorm(SIZE, elementwise_affine=False)):
        assert not are_bounded([rms, other], [rms])
        assert not are_bounded([rms], [rms, other])
    assert not Sd3FusedBlock(sd3_block(qk_norm=None)).bounded


def test_a_mask_gradients_and_other_numbers_keep_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = counted(monkeypatch)
    heads = torch.randn(3, 2, 5, HEADS, SIZE)
    attend(*heads.bfloat16(), bounded=True)
    assert len(shapes) == 1
    attend(*heads.bfloat16())
    attend(*heads.bfloat16(), torch.zeros(2, 1, 1, 5).bfloat16(), bounded=True)
    attend(*heads, bounded=True)
    attend(*heads.half(), bounded=True)
    attend(*torch.randn(3, 2, 5, HEADS, 24).bfloat16(), bounded=True)
    with torch.inference_mode(False), torch.enable_grad():
        query = torch.randn(2, 5, HEADS, SIZE, dtype=torch.bfloat16, requires_grad=True)
        attend(query, query, query, bounded=True).sum().backward()
        assert query.grad is not None
    assert len(shapes) == 1


def heads_in_parts() -> tuple[Tensor, Tensor, Tensor]:
    """Queries of three blocks, the last one in part; keys of two."""
    return torch.randn(2, 150, 3, 16), torch.randn(2, 203, 3, 16), torch.randn(2, 203, 3, 16)


def test_attention_is_exact_but_for_rounding_and_neither_overflows_nor_loses_digits() -> None:
    query, key, value = heads_in_parts()
    found, expected = fp8_attention(query, key, value), torchs_attention(query, key, value)
    assert found.shape == query.shape
    assert 1e-3 < float((found - expected).norm() / expected.norm()) < 0.08
    # With one scale for all, queries a million times smaller than the largest would be zero.
    expected = found[:, QUERIES:]
    query[:, :QUERIES] *= 1e6
    assert torch.equal(fp8_attention(query, key, value)[:, QUERIES:], expected)
    query, key, value = heads_in_parts()
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
        return torchs_attention(query, key, value)

    monkeypatch.setattr(wan, "fp8_attention", count)
    latents, rows = initial_noise([3], backbone.latent_shape), backbone.encode(PROMPTS[:1], 1.0)
    backbone.velocity(transformer, latents, torch.tensor([0.9]), rows, 1.0)
    blocks = len(list(transformer.get_submodule("blocks").children()))
    tokens = latents[0, 0].numel() // backbone.transformer.config.patch_size[1] ** 2
    assert lengths == [(tokens, tokens)] * (blocks if precision == "fp8" else 0)
