"""Outliers that change nothing in exact arithmetic, for models whose attention has biases.

Attention mixes values with weights that sum to one. So a constant that is added to channels of all values comes out of
the mixing as it is, and the next layer's bias takes it out again.
"""

import json
from pathlib import Path
from typing import Any

import torch
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.model_options import read_options

CHANNELS = [3, 17, 40]


def save_with_outliers(folder: Path, attention: str, size: float, **options: Any) -> None:
    """Save a copy of mini-flux, with `options` instead of its own in solrl.json, and outliers in an attention.

    They are `size` in `CHANNELS` of all values, which are the inputs of `to_out.0` and `to_add_out`.
    """
    backbone = load_backbone("mini-flux")
    parts = dict(backbone.transformer.get_submodule(attention).named_modules())
    with torch.no_grad():
        for name in ("to_v", "add_v_proj"):
            parts[name].bias[CHANNELS] += size
        for name in ("to_out.0", "to_add_out"):
            parts[name].bias -= size * parts[name].weight[:, CHANNELS].sum(1)
    backbone.pipeline.save_pretrained(folder)
    own = vars(read_options(locate("mini-flux"))) | options  # with absolute paths
    given = {name: value for name, value in own.items() if value is not None}
    (folder / "solrl.json").write_text(json.dumps(given))
