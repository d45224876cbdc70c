"""Outliers that change nothing in exact arithmetic, for models whose attention has biases.

Attention mixes values with weights that sum to one. So a constant that is added to channels of all values comes out of
the mixing as it is, and the next layer's bias takes it out again.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.model_options import read_options
from torch import nn

_PAIRS = (("to_v", "to_out.0"), ("add_v_proj", "to_add_out"))
CHANNELS = (3, 17, 40)


def add_value_outliers(attention: nn.Module, size: float, channels: Sequence[int] = CHANNELS) -> list[str]:
    """Add `size` to channels of the values of a joint attention; returns the layers that see these as inputs."""
    found = []
    with torch.no_grad():
        for value_name, out_name in _PAIRS:
            value, out = (attention.get_submodule(name) for name in (value_name, out_name))
            added = torch.zeros(value.out_features, dtype=out.weight.dtype)
            added[list(channels)] = size
            value.bias += added
            out.bias -= out.weight @ added
            found.append(out_name)
    return found


def save_with_outliers(
    folder: Path, attention: str, size: float, channels: Sequence[int] = CHANNELS, **options: Any
) -> None:
    """Save a copy of mini-flux with outliers in an attention, and these options instead of its own in solrl.json."""
    backbone = load_backbone("mini-flux")
    add_value_outliers(backbone.transformer.get_submodule(attention), size, channels)
    backbone.pipeline.save_pretrained(folder)
    own = vars(read_options(locate("mini-flux"))) | options  # with absolute paths
    given = {name: value for name, value in own.items() if value is not None}
    (folder / "solrl.json").write_text(json.dumps(given))
