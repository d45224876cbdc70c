"""Generators of damaged and invalid adapter files."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import safetensors.torch
import torch
from solrl_core.adapter import Adapter, decode_adapter, encode_adapter
from solrl_core.errors import AdapterError

from fault_trials.adapters import layout

Item = TypeVar("Item")

BAD_VALUES = (float("nan"), float("inf"), -float("inf"))


@dataclass(frozen=True)
class Damaged:
    """A damaged file, the problem kinds that may refuse it, and whether it is sent with its own (right) digest."""

    what: str
    body: bytes
    kinds: Sequence[str]
    own_digest: bool


def header_length(body: bytes) -> int:
    """Number of bytes before the tensors."""
    return 8 + int.from_bytes(body[:8], "little")


def on_the_way(body: bytes, flips: int, share: float) -> Iterator[Damaged]:
    """Files damaged in transit, after the digest was taken: flipped bits and truncations."""
    chance, start, refused = random.Random(0), header_length(body), ("digest-mismatch",)
    for place in sampled(range(start), share):
        yield Damaged("header byte", flipped(body, place, 1 << chance.randrange(8)), refused, False)
    for _ in range(flips):
        place, bit = chance.randrange(start, len(body)), 1 << chance.randrange(8)
        yield Damaged("payload flip", flipped(body, place, bit), refused, False)
    for length in sampled(_ends(body), share):
        yield Damaged("truncated", body[:length], refused, False)
    yield Damaged("longer", body + b"\0", refused, False)


def at_the_sender(adapter: Adapter, body: bytes, share: float) -> Iterator[Damaged]:
    """Files that were already invalid when the digest was taken."""
    malformed = ("adapter-malformed", "adapter-metadata", "adapter-keys", "adapter-dtype", "adapter-shape")
    chance = random.Random(1)
    for place in sampled(range(header_length(body)), share):
        changed = flipped(body, place, 1 << chance.randrange(8))
        if not says_another_alpha(changed, adapter):
            yield Damaged("header byte, digest right", changed, malformed, True)
    for length in sampled(_ends(body), share):
        yield Damaged("truncated, digest right", body[:length], malformed, True)
    yield Damaged("longer, digest right", body + b"\0", malformed, True)
    for key, tensor in sampled(sorted(adapter.tensors.items()), share):
        for value in BAD_VALUES:
            bad = tensor.clone()
            bad.view(-1)[chance.randrange(bad.numel())] = value
            changed = encode_adapter(Adapter(adapter.rank, adapter.alpha, adapter.tensors | {key: bad}))
            yield Damaged("NaN or infinite", changed, ("adapter-nonfinite",), True)
        rest = {name: one for name, one in adapter.tensors.items() if name != key}
        for wrong in (tensor.T, tensor[:-1], tensor[:, :-1], tensor[None], torch.cat([tensor, tensor])):
            yield Damaged("wrong shape", _file(rest | {key: wrong}, adapter), ("adapter-shape",), True)
        yield Damaged("wrong dtype", _file(rest | {key: tensor.half()}, adapter), ("adapter-dtype",), True)
        yield Damaged("tensor missing", _file(rest, adapter), ("adapter-keys",), True)
        yield Damaged("tensor too many", _file(adapter.tensors | {f"{key}x": tensor}, adapter), ("adapter-keys",), True)


def says_another_alpha(body: bytes, adapter: Adapter) -> bool:
    """Whether a file is valid and differs from `adapter` only in its alpha.

    Such a file is another adapter, not a damaged one. Only the sender's digest could tell.
    """
    try:
        read = decode_adapter(body, layout())
    except AdapterError:
        return False
    same = all(torch.equal(value, adapter.tensors[key]) for key, value in read.tensors.items())
    return same and read.rank == adapter.rank and read.alpha != adapter.alpha


def flipped(body: bytes, place: int, mask: int) -> bytes:
    """Copy of `body` with the bits of `mask` flipped at `place`."""
    changed = bytearray(body)
    changed[place] ^= mask
    return bytes(changed)


def sampled(items: Sequence[Item], share: float) -> Sequence[Item]:
    """Evenly spaced `share` of the items."""
    return items[:: max(1, round(1 / share))]


def _ends(body: bytes) -> list[int]:
    """Truncation points: in the length, in the header, and at the ends and in the middle of each tensor."""
    start = header_length(body)
    header = json.loads(body[8:start])
    tensors = [value["data_offsets"] for key, value in header.items() if key != "__metadata__"]
    ends = {start + edge + by for pair in tensors for edge in (*pair, sum(pair) // 2) for by in (-1, 0, 1)}
    ends |= {*range(10), *range(10, start + 2, 97)}
    return sorted(end for end in ends if 0 <= end < len(body))


def _file(tensors: dict[str, torch.Tensor], adapter: Adapter) -> bytes:
    copies = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    metadata = {"r": str(adapter.rank), "lora_alpha": str(adapter.alpha)}
    file: bytes = safetensors.torch.save(copies, metadata=metadata)
    return file
