"""Linear layers whose products round alike for any small number of rows on a CPU.

A processor's library chooses another kernel for products of few rows, at a number that differs between processors: 4 on
one, 11 on another. Only the layers that see one row per candidate, such as the time embedding, have so few.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.precision import QuantLinear

FEWEST_ROWS = 16


def pad_to_min_rows(transformer: nn.Module) -> None:
    """Compute at least `FEWEST_ROWS` rows in each linear layer of a transformer that gets [rows, in]; in place."""
    for module in transformer.modules():
        if isinstance(module, nn.Linear | QuantLinear):
            module.forward = partial(_padded, module.forward)  # type: ignore[method-assign]


def _padded(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    count = len(x)
    if x.ndim != 2 or count >= FEWEST_ROWS:
        return forward(x)
    return forward(F.pad(x, (0, 0, 0, FEWEST_ROWS - count)))[:count]
