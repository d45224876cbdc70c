"""Corrupted and invalid adapters: the service refuses all of them, and its images do not change by a bit."""

import asyncio
import itertools
import random

import redis
from solrl_core.adapter import encode_adapter
from solrl_rollout.store.errors import CorruptError
from solrl_rollout.store.redis_store import RedisRunStore
from support.adapters import content_digest, random_adapter, stored_version
from support.redis_server import running_redis

from fault_trials.adapters import kind, layout, put, rollout_body
from fault_trials.damage import Damaged, at_the_sender, flipped, header_length, on_the_way, sampled
from fault_trials.findings import Findings, Row
from fault_trials.processes import RolloutService, rollout_service

RUN = "whole"
FULL = 10_000


def run(flips: int, findings: Findings) -> None:
    """Try `flips` flipped bits in the tensors, and the same share of every other kind of damage."""
    share = min(1.0, flips / FULL)
    adapter = random_adapter(layout(), 1)
    body = encode_adapter(adapter)
    findings.counted["bytes of header and tensors"] = f"{header_length(body)} + {len(body) - header_length(body)}"
    with rollout_service() as service:
        put(service.http, RUN, 0, body).raise_for_status()
        before = _images(service)
        for damaged in itertools.chain(on_the_way(body, flips, share), at_the_sender(adapter, body, share)):
            _push(service, damaged, content_digest(body), findings)
            findings.done(damaged.what)
        findings.require(_images(service) == before, "at the end", "images differ")
        held = service.http.get(f"/v1/runs/{RUN}/adapters").json()
        findings.require([one["version"] for one in held["versions"]] == [0], "at the end", f"it holds {held}")
        stored = service.http.get(f"/v1/runs/{RUN}/adapters/0/weights").content
        findings.require(stored == body, "at the end", "the stored bytes differ")
    asyncio.run(_in_redis(body, share, findings))


def _push(service: RolloutService, damaged: Damaged, digest: str, findings: Findings) -> None:
    answer = put(service.http, RUN, 1, damaged.body, parent=0, digest=None if damaged.own_digest else digest)
    refused = answer.status_code == 422 and kind(answer) in damaged.kinds
    findings.add(damaged.what)
    findings.require(refused, damaged.what, f"answered {answer.status_code} {answer.text[:200]}")


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
    chance = random.Random(2)
    with running_redis() as server, redis.Redis.from_url(server.url) as client:
        store = RedisRunStore(server.url)
        await store.put("tenant", info, body)
        (chunk,) = client.keys("*:blob:*")
        places = [chance.randrange(len(body)) for _ in range(1000)]
        damages = [flipped(body, place, 1 << chance.randrange(8)) for place in sampled(places, share)]
        for wrong in (*damages, body[:-1], body + b"\0", b"", None):
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


ROW = Row(
    "corrupted",
    "corrupted adapters (each header byte, 10,000 payload flips, truncations), NaN, Inf, wrong shapes: all refused; "
    "images before and after bit-identical",
    full=FULL,
    short=20,
    run=run,
)
