"""Plain arithmetic of the candidate kernels against diffusers' attention, and the bound of RMS-normed logits."""

import math
from collections.abc import Iterator

import pytest
import torch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0, SanaLinearAttnProcessor2_0
from kernel_sweep import __main__ as sweep
from kernel_sweep.plain import LARGEST_LOGIT, bounded_attention, linear_attention, rms_logit_bound
from torch import Tensor, nn

HEADS, SIZE = 3, 16


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def test_linear_attention_equals_sanas() -> None:
    attn = Attention(48, heads=HEADS, dim_head=SIZE, processor=SanaLinearAttnProcessor2_0())
    x = torch.randn(2, 25, 48)
    plain = linear_attention(attn.to_q(x), attn.to_k(x), attn.to_v(x), HEADS)
    torch.testing.assert_close(attn.to_out[0](plain), attn(x))


def joint_attention() -> tuple[Attention, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """SD3's attention with random norm weights, inputs of it, and its normed queries, keys and values."""
    attn = Attention(
        48,
        heads=HEADS,
        dim_head=SIZE,
        added_kv_proj_dim=48,
        context_pre_only=False,
        qk_norm="rms_norm",
        bias=True,
        processor=JointAttnProcessor2_0(),
    )
    for norm, largest in ((attn.norm_q, 1), (attn.norm_k, 2), (attn.norm_added_q, 4), (attn.norm_added_k, 1)):
        norm.weight.copy_(largest * torch.rand(SIZE))
    image, text = torch.randn(2, 25, 48), torch.randn(2, 7, 48)

    def both(own: nn.Module, added: nn.Module, norms: tuple[nn.Module, nn.Module] | None) -> Tensor:
        parts = own(image).unflatten(-1, (HEADS, SIZE)), added(text).unflatten(-1, (HEADS, SIZE))
        return torch.cat([norm(x) for norm, x in zip(norms, parts, strict=True)] if norms else parts, 1)

    query = both(attn.to_q, attn.add_q_proj, (attn.norm_q, attn.norm_added_q))
    key = both(attn.to_k, attn.add_k_proj, (attn.norm_k, attn.norm_added_k))
    return attn, (image, text), (query, key, both(attn.to_v, attn.add_v_proj, None))


def test_attention_without_a_maximum_equals_sd3s() -> None:
    attn, inputs, qkv = joint_attention()
    plain = bounded_attention(*qkv).flatten(2)
    image, text = attn(*inputs)
    torch.testing.assert_close(attn.to_out[0](plain[:, :25]), image)
    torch.testing.assert_close(attn.to_add_out(plain[:, 25:]), text)


def test_the_bound_is_the_largest_logit_of_sd3s_norms() -> None:
    """A vector along one channel keeps its whole length there, which gives the largest logits."""
    attn, _, (query, key, _) = joint_attention()
    along = torch.eye(SIZE)
    queries = torch.cat([attn.norm_q(along), attn.norm_added_q(along), query.flatten(0, 2)])
    keys = torch.cat([attn.norm_k(along), attn.norm_added_k(along), key.flatten(0, 2)])
    largest = float((queries @ keys.mT).abs().max()) / math.sqrt(SIZE)
    bound = rms_logit_bound(
        [attn.norm_q.weight, attn.norm_added_q.weight], [attn.norm_k.weight, attn.norm_added_k.weight]
    )
    assert largest <= bound <= 1.021 * largest


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_logits_neither_overflow_nor_underflow(sign: int) -> None:
    query = torch.full((1, 1, 1, 64), math.sqrt(LARGEST_LOGIT / 8))
    value = torch.randn(1, 4301, 1, 64) * 100
    attended = bounded_attention(query, sign * query.expand(1, 4301, 1, 64), value)
    torch.testing.assert_close(attended[0, 0, 0], value.mean(1)[0, 0], atol=1e-3, rtol=1e-3)


def test_a_candidate_of_another_result_is_not_compared() -> None:
    rows = [
        {"case": "a", "kernel": "product", "ms": 2.0, "errors": [0.001, 0.002]},
        {"case": "a", "kernel": "wrong", "failed": "differs: error 0.5, expected at most 0.004"},
        {"case": "a", "kernel": "right", "ms": 1.0, "errors": [0.001, 0.003]},
    ]
    text = "\n".join(sweep.table(rows))
    assert "| wrong | differs: error 0.5, expected at most 0.004 | |" in text
    assert "| right | 1.0000 | 0.003 |" in text
    assert "right takes 1.0000 ms: 2.00 × the speed of the product's" in text
