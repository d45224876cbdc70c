"""Rounds a trained miniature's weights to the NVFP4 grid, so that BF16 and NVFP4 differ only in their activations.

Rounding to nearest would cost a model of two million parameters much of its accuracy. Instead, columns are rounded one
after the other, and the remaining columns compensate for the error on inputs that the model really sees.

Source: GPTQ, Frantar et al., arXiv 2210.17323.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from solrl_core.kernels.rows import E4M3_MAX
from solrl_core.precision.nvfp4 import BLOCK, E2M1_MAX
from torch import Tensor, nn

DAMPING = 0.01
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@torch.no_grad()
def round_weights(model: nn.Module, names: Sequence[str], run: Callable[[], object]) -> None:
    """Round the weights of linear layers in place.

    Args:
        model: model that contains the layers.
        names: dotted names of the layers, each an `nn.Linear`.
        run: runs the model on typical inputs.
    """
    squares: dict[str, Tensor] = {}

    def collect(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).double()
        squares[name] = squares.get(name, torch.zeros((), device=rows.device)) + rows.T @ rows

    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(collect, name)) for name in names]
    run()
    for hook in hooks:
        hook.remove()
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        layer.weight.copy_(rounded(layer.weight, squares[name]))


def rounded(weight: Tensor, square: Tensor) -> Tensor:
    """Round `weight` [out, in] to the NVFP4 grid, minimising the error on inputs whose XᵀX is `square` [in, in]."""
    left = weight.double().clone()
    damped = square + DAMPING * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype)
    spread = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    encode = E2M1_MAX * E4M3_MAX / left.abs().amax()
    found = torch.zeros_like(left)
    for start in range(0, left.shape[1], BLOCK):
        largest = left[:, start : start + BLOCK].abs().amax(1, keepdim=True)
        step = (largest * encode / E2M1_MAX).clamp(max=E4M3_MAX).float().to(torch.float8_e4m3fn).double() / encode
        for column in range(start, start + BLOCK):
            found[:, column] = _nearest(left[:, column], step[:, 0])
            error = (left[:, column] - found[:, column]) / spread[column, column]
            left[:, column + 1 :] -= error[:, None] * spread[column, column + 1 :]
    return found.to(weight.dtype)


def _nearest(values: Tensor, step: Tensor) -> Tensor:
    """Round to the nearest multiples of `step` that E2M1 can represent."""
    codes = torch.where(step > 0, values / step, 0.0)
    magnitudes = _MAGNITUDES.to(values)
    index = (codes.abs()[:, None] - magnitudes).abs().argmin(1)
    return codes.sign() * magnitudes[index] * step
