"""Elementwise functions for Triton kernels."""

from solrl_core.kernels.operation import tl, triton


@triton.jit
def tanh(x):
    """The hardware's tanh, whose relative error is up to 2**-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def silu(x, EXACT: tl.constexpr):
    """SiLU, if not EXACT by the hardware's tanh: one instruction instead of an exponential and a division."""
    if EXACT:
        return x / (1 + tl.exp(-x))
    else:
        half = 0.5 * x
        return half * tanh(half) + half


@triton.jit
def relu(x):
    """ReLU, which keeps NaN like torch's."""
    return tl.where(x < 0, 0, x)


@triton.jit
def halves(x, dtype: tl.constexpr):
    """Two numbers of 8 bits each whose sum has 16: tensor cores multiply no wider ones."""
    first = x.to(dtype)
    return first, (x - first.to(tl.float32)).to(dtype)


@triton.jit
def low(word):
    """The first of a BF16 pair, in float32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(word):
    """The second of a BF16 pair, in float32."""
    return (word & -65536).to(tl.float32, bitcast=True)
