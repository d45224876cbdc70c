"""Corrupted and invalid adapters: the service refuses all of them, and its images do not change by a bit."""

import asyncio
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import redis
import safetensors.torch
import torch
from solrl_core.adapter import Adapter, decode_adapter, encode_adapter
from solrl_core.errors import AdapterError
from solrl_rollout.store.errors import CorruptError
from solrl_rollout.store.redis_store import RedisRunStore
from tests.support.adapters import content_digest, random_adapter, stored_version
from tests.support.redis_server import running_redis

from fault_trials.adapters import kind, layout, put, rollout_body
from fault_trials.findings import Findings, Row
from fault_trials.services import RolloutService, rollout_service

RUN = "whole"
FULL = 10_000
BAD_VALUES = (float("nan"), float("inf"), -float("inf"))

Item = TypeVar("Item")


@dataclass(frozen=True)
class Damaged:
    """A damaged file, the problem kinds that may refuse it, and whether it is sent with its own (right) digest."""

    what: str
    body: bytes
    kinds: Sequence[str]
    own_digest: bool = True


def run(flips: int, findings: Findings) -> None:
    """Try `flips` flipped bits in the tensors, and the same share of every other kind of damage."""
    share = min(1.0, flips / FULL)
    adapter = random_adapter(layout(), 1)
    body = encode_adapter(adapter)
    start = header_length(body)
    findings.counted["bytes of header and tensors"] = f"{start} + {len(body) - start}"
    with rollout_service() as service:
        put(service.http, RUN, 0, body).raise_for_status()
        before = _images(service)
        for damaged in itertools.chain(on_the_way(body, flips, share), at_the_sender(adapter, body, share)):
            digest = None if damaged.own_digest else content_digest(body)
            answer = put(service.http, RUN, 1, damaged.body, parent=0, digest=digest)
            refused = answer.status_code == 422 and kind(answer) in damaged.kinds
            findings.add(damaged.what)
            findings.require(refused, damaged.what, f"answered {answer.status_code} {answer.text[:200]}")
            findings.done(damaged.what)
        findings.require(_images(service) == before, "at the end", "images differ")
        held = service.http.get(f"/v1/runs/{RUN}/adapters").json()
        findings.require([one["version"] for one in held["versions"]] == [0], "at the end", f"it holds {held}")
        stored = service.http.get(f"/v1/runs/{RUN}/adapters/0/weights").content
        findings.require(stored == body, "at the end", "the stored bytes differ")
    asyncio.run(_in_redis(body, share, findings))


def _images(service: RolloutService) -> list[str]:
    """Encoded images generated with the adapter and without one."""
    images = []
    for adapter in ((RUN, 0), None):
        answer = service.http.post("/v1/rollouts", json=rollout_body(run=adapter, count=8, images="png"))
        answer.raise_for_status()
        images += answer.json()["groups"][0]["images"]
    return images


async def _in_redis(body: bytes, share: float, findings: Findings) -> None:
    """Damage the bytes stored in Redis; the store must detect it when reading them."""
    info, _ = stored_version(body, run=RUN, version=0, parent=None)
    with running_redis() as server, redis.Redis.from_url(server.url) as client:
        store = RedisRunStore(server.url)
        await store.put("tenant", info, body)
        (chunk,) = client.keys("*:blob:*")
        chance = random.Random(3)
        places = [chance.randrange(len(body)) for _ in range(1000)]
        for wrong in (*_flips(body, sampled(places, share), 2), body[:-1], body + b"\0", b"", None):
            client.delete(chunk) if wrong is None else client.set(chunk, wrong)
            try:
                await store.get("tenant", RUN, 0)
                found = False
            except CorruptError:
                found = True
            findings.require(found, "damaged in Redis", "not found")
            findings.add("damaged in Redis")
            findings.done("damaged in Redis")
        client.set(chunk, body)
        findings.require(await store.get("tenant", RUN, 0) == (info, body), "damaged in Redis", "not mended")
        await store.close()


def header_length(body: bytes) -> int:
    """Number of bytes before the tensors."""
    return 8 + int.from_bytes(body[:8], "little")


def on_the_way(body: bytes, flips: int, share: float) -> Iterator[Damaged]:
    """Files damaged in transit, after the digest was taken: flipped bits and truncations."""
    chance, start = random.Random(0), header_length(body)
    damages = {
        "header byte": _flips(body, sampled(range(start), share), 0),
        "payload flip": _flips(body, (chance.randrange(start, len(body)) for _ in range(flips)), 1),
        "truncated": (body[:length] for length in sampled(_ends(body), share)),
        "longer": [body + b"\0"],
    }
    for what, files in damages.items():
        yield from (Damaged(what, file, ("digest-mismatch",), own_digest=False) for file in files)


def at_the_sender(adapter: Adapter, body: bytes, share: float) -> Iterator[Damaged]:
    """Files that were already invalid when the digest was taken."""
    malformed = ("adapter-malformed", "adapter-metadata", "adapter-keys", "adapter-dtype", "adapter-shape")
    for changed in _flips(body, sampled(range(header_length(body)), share), 1):
        if not says_another_alpha(changed, adapter):
            yield Damaged("header byte, digest right", changed, malformed)
    for length in sampled(_ends(body), share):
        yield Damaged("truncated, digest right", body[:length], malformed)
    yield Damaged("longer, digest right", body + b"\0", malformed)
    chance = random.Random(1)
    for key, tensor in sampled(sorted(adapter.tensors.items()), share):
        for value in BAD_VALUES:
            bad = tensor.clone()
            bad.view(-1)[chance.randrange(bad.numel())] = value
            changed = encode_adapter(Adapter(adapter.rank, adapter.alpha, adapter.tensors | {key: bad}))
            yield Damaged("NaN or infinite", changed, ("adapter-nonfinite",))
        rest = {name: one for name, one in adapter.tensors.items() if name != key}
        for wrong in (tensor.T, tensor[:-1], tensor[:, :-1], tensor[None], torch.cat([tensor, tensor])):
            yield Damaged("wrong shape", _file(rest | {key: wrong}, adapter), ("adapter-shape",))
        yield Damaged("wrong dtype", _file(rest | {key: tensor.half()}, adapter), ("adapter-dtype",))
        yield Damaged("tensor missing", _file(rest, adapter), ("adapter-keys",))
        yield Damaged("tensor too many", _file(adapter.tensors | {f"{key}x": tensor}, adapter), ("adapter-keys",))


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


def sampled(items: Sequence[Item], share: float) -> Sequence[Item]:
    """Evenly spaced `share` of the items."""
    return items[:: max(1, round(1 / share))]


def _flips(body: bytes, places: Iterable[int], seed: int) -> Iterator[bytes]:
    """Copies of `body` with a bit flipped, at each place another one."""
    chance = random.Random(seed)
    for place in places:
        changed = bytearray(body)
        changed[place] ^= 1 << chance.randrange(8)
        yield bytes(changed)


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


ROW = Row(
    "corrupted",
    "corrupted adapters (each header byte, 10,000 payload flips, truncations), NaN, Inf, wrong shapes: all refused; "
    "images before and after bit-identical",
    full=FULL,
    short=20,
    run=run,
)
