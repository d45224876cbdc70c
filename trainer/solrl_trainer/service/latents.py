"""Latents in answers of a rollout service."""

import base64
import binascii
import hashlib
import math
from collections.abc import Sequence

import torch
from solrl_client.answers import served_differently
from solrl_proto.rollouts import RolloutGroup


def from_base64(group: RolloutGroup, shape: Sequence[int], *, adapter: str, url: str) -> torch.Tensor:
    """Decode the latents of a group without pruned candidates.

    Args:
        group: part of an answer that was checked against its request.
        shape: shape of one candidate's latents.
        adapter: digest of the adapter's file under which they must have been generated.
        url: URL of the service, for messages.

    Returns:
        float32 [N, *shape].

    Raises:
        ProblemError: 409 `served-differently`, naming the field.
    """
    assert group.latents is not None
    name, size = f"group {group.prompt_id!r}: latents", 4 * math.prod(shape)
    if group.latents.adapter != adapter:
        raise served_differently(url, f"{name}.adapter", group.latents.adapter, adapter)
    parts = [_decoded(value or "") for value in group.latents.values]
    for place, part in enumerate(parts):
        if len(part) != size:
            raise served_differently(url, f"{name}.values[{place}]", f"{len(part)} bytes", f"{size} bytes in base64")
    joined = b"".join(parts)
    if (digest := f"sha256:{hashlib.sha256(joined).hexdigest()}") != group.latents.digest:
        raise served_differently(url, f"{name}.digest", group.latents.digest, f"{digest}, of the values")
    latents = torch.frombuffer(bytearray(joined), dtype=torch.float32).view(len(parts), *shape)
    if not torch.isfinite(latents).all():
        raise served_differently(url, f"{name}.values", "a value that is not finite", "finite values")
    return latents


def _decoded(value: str) -> bytes:
    """The bytes of base64; none if it is something else."""
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return b""
