"""Memory of rewards, counted without loading their weights."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from solrl_core.reward_registry import REWARDS
from solrl_core.rewards.loading import dtype_named
from solrl_core.rewards.reward import AT


def reward_bytes(name: str, options: Mapping[str, Any]) -> int | None:
    """Bytes of a reward's weights on the GPU, none if a server computes it; None if they cannot be counted.

    Weights in local safetensors files are counted from the files, published ones by the reward's `parameters`.

    Raises:
        ValueError: no such reward, or no such dtype.
    """
    if AT in options:
        return 0
    reward = REWARDS.find(name)
    published = getattr(reward, "parameters", None)
    if published is None:
        return None
    if str(options.get("device", "")).startswith("cpu"):
        return 0
    weights = Path(str(options.get("model") or options.get("checkpoint") or ""))
    files = sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights]
    local = [file for file in files if file.suffix == ".safetensors" and file.is_file()]
    count = 0 if local else int(published)
    for file in local:
        with safe_open(str(file), "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    return count * dtype_named(str(options.get("dtype", getattr(reward, "dtype", "float32")))).itemsize
