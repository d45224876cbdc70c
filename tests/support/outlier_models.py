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

_VALUES = ("to_v", "add_v_proj")
_OUTS = ("to_out.0", "to_add_out")
CHANNELS = (3, 17, 40)


def add_value_outliers(attention: nn.Module, size: float, channels: Sequence[int] = CHANNELS) -> list[str]:
    """Add `size` to channels of the values of an attention; returns the layers that see these as inputs."""
    values, outs = _layers(attention, _VALUES), _layers(attention, _OUTS)
    with torch.no_grad():
        for value in values.values():
            value.bias[list(channels)] += size
        for out in outs.values():
            out.bias -= size * out.weight[:, list(channels)].sum(1)
    return list(outs)


def _layers(attention: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """Those of the named layers that an attention has."""
    have = {name: part for name, part in attention.named_modules() if isinstance(part, nn.Linear)}
    return {name: have[name] for name in names if name in have}


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
