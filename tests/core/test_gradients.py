"""Gradients of the fused blocks and of attention: those of diffusers, on a GPU those of every kernel that is chosen."""

import pytest
import torch
import torch.nn.functional as F
from solrl_core.kernels.attention import _KERNELS, attend, kernel_name
from solrl_core.kernels.rope import rms_norm_rope
from tests.core.gpu_marks import GPU, relative, torchs_attention
from torch import Tensor


def heads(tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu", size: int = 16) -> Tensor:
    return torch.randn(2, tokens, 3, size, device=device).to(dtype).requires_grad_()


def text_mask(keys: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    mask = torch.zeros(2, 1, 1, keys, dtype=dtype, device=device)
    mask[..., keys // 2 :] = -10000.0
    return mask


@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradient_are_those_of_torch(masked: bool) -> None:
    torch.manual_seed(0)
    given = heads(5), heads(7), heads(7)
    mask = text_mask(7) if masked else None
    out, true = attend(*given, mask), torchs_attention(*given, mask)
    upstream = torch.randn(out.shape)
    found, wanted = (torch.autograd.grad(y, given, upstream) for y in (out, true))
    assert all(relative(x, y) < 1e-5 for x, y in zip((out, *found), (true, *wanted), strict=True))
    with torch.no_grad():
        assert torch.equal(attend(*given, mask), torchs_attention(*given, mask))


@GPU
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys", "size"), [(1152, 1152, 128), (341, 341, 64), (1024, 300, 112)])
def test_attention_on_a_gpu_is_right(queries: int, keys: int, size: int, masked: bool, sliced: bool) -> None:
    torch.manual_seed(0)
    given = tuple(heads(tokens, torch.bfloat16, "cuda", size) for tokens in (queries, keys, keys))
    mask = text_mask(keys, torch.bfloat16, "cuda") if masked else None
    out = attend(*given, mask)
    upstream = torch.randn(2, queries, 5 * 3 * size, device="cuda", dtype=torch.bfloat16)
    upstream = (upstream[..., : 3 * size] if sliced else upstream[..., : 3 * size].contiguous()).view_as(out)
    found = torch.autograd.grad(out, given, upstream)
    wide = tuple(x.detach().double().requires_grad_() for x in given)
    true = torchs_attention(*wide, None if mask is None else mask.double())
    wanted = torch.autograd.grad(true, wide, upstream.double())
    assert all(relative(x, y) < 0.01 for x, y in zip((out, *found), (true, *wanted), strict=True))


@GPU
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("masked", [False, True])
def test_each_kernel_that_is_there_is_right(name: str, masked: bool) -> None:
    if (name == "flash" and masked) or (name == "cudnn" and torch.cuda.get_device_capability() < (8, 0)):
        pytest.skip("the kernel takes no such input")
    torch.manual_seed(0)
    query, key, value, upstream = (heads(n, torch.bfloat16, "cuda", 64).transpose(1, 2) for n in (256, 300, 300, 256))
    mask = text_mask(300, torch.bfloat16, "cuda") if masked else None
    plain, kernel = _KERNELS["plain"], _KERNELS[name]
    with torch.no_grad():
        out, logsumexp = kernel.forward(query, key, value, mask)
        found = kernel.backward(upstream, query, key, value, out, logsumexp, mask)
        wide = [x.float() for x in (query, key, value)]
        true, true_logsumexp = plain.forward(*wide, mask)
        wanted = plain.backward(upstream.float(), *wide, true, true_logsumexp, mask)
    pairs = zip((out, logsumexp, *found), (true, true_logsumexp, *wanted), strict=True)
    assert all(relative(x, y) < 0.01 for x, y in pairs)


@GPU
def test_a_hopper_gpu_attends_by_cudnn() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("another GPU may choose otherwise")
    shape = torch.Size((2, 1152, 4, 128))
    assert kernel_name(torch.device("cuda", 0), torch.bfloat16, shape, 1152, False) == "cudnn"


def turned(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed = F.rms_norm(x, x.shape[-1:], weight.double(), 1e-6)
    even, odd = normed[..., ::2], normed[..., 1::2]
    c, s = (y[: x.shape[1], None].double() for y in (cos, sin))
    return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("text", [0, 1, 4])
def test_the_gradient_of_norm_and_positions(text: int, device: str) -> None:
    torch.manual_seed(0)
    parts = [heads(tokens, device=device) for tokens in (5, text) if tokens]
    weights = [torch.rand(16, device=device) + 0.5 for _ in parts]
    angles = torch.randn(9, 8, device=device)
    cos, sin = angles.cos(), angles.sin()
    out = rms_norm_rope(parts[0], weights[0], cos, sin, 1e-6, *parts[1:], *weights[1:])
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, parts, upstream)
    wide = [part.detach().double().requires_grad_() for part in parts]
    true = [turned(wide[0], weights[0], cos[text:], sin[text:])]
    if text:
        true.insert(0, turned(wide[1], weights[1], cos, sin))
    wanted = torch.autograd.grad(torch.cat(true, 1), wide, upstream.double())
    assert relative(out, torch.cat(true, 1)) < 1e-6
    assert all(relative(x, y) < 1e-6 for x, y in zip(found, wanted, strict=True))
