"""A refused adapter is never served: a damaged body is not cached under the digest that was sent with it."""

import asyncio
import gc
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from solrl_core.adapter import Adapter, encode_adapter, lora_a_key, lora_b_key
from solrl_http.problem_responses import Refusal
from solrl_proto.adapters import AdapterInfo, adapter_digest
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import AdapterRef
from solrl_rollout.engine.adapters import AdapterMemory, Adapters
from solrl_rollout.engine.work import LeasedAdapter
from solrl_rollout.engine.workers.process import memory_file
from solrl_rollout.engine.workers.remote import SharedAdapters
from solrl_rollout.store import MemoryRunStore

pytestmark = pytest.mark.anyio

LAYOUT = {"block.linear": (4, 3)}
HOSTED: Any = SimpleNamespace(info=SimpleNamespace(name="mini"), adapter_layout=LAYOUT)


def adapter() -> Adapter:
    tensors = {lora_a_key("block.linear"): torch.ones(2, 3), lora_b_key("block.linear"): torch.ones(4, 2)}
    return Adapter(rank=2, alpha=2.0, tensors=tensors)


def adapters_of(store: MemoryRunStore, limit: int = 2**20, tenant_limit: int = 2**20) -> Adapters:
    return Adapters(store, AdapterMemory(limit, tenant_limit))


async def push(adapters: Adapters, version: int, body: bytes, digest: str) -> str | None:
    """The kind of problem, if it was refused."""
    parent = version - 1 if version else None
    try:
        await adapters.push("tenant", "run", version, parent, digest, body, HOSTED)
    except ProblemError as error:
        return error.problem.kind
    return None


async def test_a_damaged_body_is_refused_and_a_worker_reads_a_good_one_as_it_was_pushed() -> None:
    store, files = MemoryRunStore(), SharedAdapters(memory_file)
    adapters, metadata = adapters_of(store), {"r": "2", "lora_alpha": "2", "by": "another program"}
    body = safetensors.torch.save(adapter().tensors, metadata)
    digest = adapter_digest(body)
    assert await push(adapters, 0, body[:-1] + b"\x40", digest) == "digest-mismatch"
    assert await push(adapters, 0, body, digest) is None
    assert await push(adapters, 1, body[:-1] + b"\x40", digest) == "digest-mismatch"
    for served in (await fetch(adapters), await fetch(adapters_of(store))):
        assert all(torch.equal(served.adapter.tensors[key], value) for key, value in adapter().tensors.items())
        assert served.file is body  # in memory once
        assert Path(f"/proc/self/fd/{files.source(served).fileno()}").read_bytes() == body


class Counting(MemoryRunStore):
    """A store that counts reads and blocks them until it is opened; the first read may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.reads = 0
        self.opened = asyncio.Event()
        self._fails = fails

    async def get(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        self.reads += 1
        first = self.reads == 1
        await self.opened.wait()
        if first and self._fails:
            raise OSError("the first read fails")
        return await super().get(tenant, run, version)


async def pushed(store: MemoryRunStore, scale: float = 1.0, version: int = 0) -> str:
    one = adapter()
    one.tensors[lora_b_key("block.linear")] *= scale
    body = encode_adapter(one)
    assert await push(adapters_of(store), version, body, adapter_digest(body)) is None
    return adapter_digest(body)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def fetch(adapters: Adapters, version: int = 0) -> Coroutine[Any, Any, LeasedAdapter]:
    return adapters.fetch("tenant", AdapterRef(run="run", version=version), HOSTED)


def requests(adapters: Adapters, count: int) -> list["asyncio.Task[LeasedAdapter]"]:
    return [asyncio.create_task(fetch(adapters)) for _ in range(count)]


async def three_versions() -> Counting:
    """A store whose reads are not blocked."""
    store = Counting()
    store.opened.set()
    for version in range(3):
        await pushed(store, 1.0 + version, version)
    return store


@pytest.mark.parametrize("cancelled", [False, True])
async def test_concurrent_requests_read_an_adapter_once_also_if_the_first_is_cancelled(cancelled: bool) -> None:
    store = Counting()
    await pushed(store)
    first, *others = requests(adapters_of(store), 16)
    await settle()
    if cancelled:
        first.cancel()
        await settle()
    store.opened.set()
    served = await asyncio.gather(*others)
    assert store.reads == 1
    assert len({id(one.adapter) for one in served}) == 1


async def test_an_error_reaches_only_the_request_that_began_the_read() -> None:
    store = Counting(fails=True)
    await pushed(store)
    first, *others = requests(adapters_of(store), 3)
    await settle()
    store.opened.set()
    with pytest.raises(OSError, match="first read"):
        await first
    await asyncio.gather(*others)
    assert store.reads == 2


class Replacing(MemoryRunStore):
    """A store in which the run is deleted and pushed again with other content before the first read."""

    digest = ""

    async def get(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        if not self.digest:
            await self.delete(tenant, run)
            self.digest = await pushed(self, 2.0)
        return await super().get(tenant, run, version)


async def test_a_version_that_is_replaced_while_it_is_read_has_the_digest_of_its_content() -> None:
    """Otherwise the engine would take the new weights for those of the old digest."""
    store = Replacing()
    before = await pushed(store)
    adapters = adapters_of(store)
    served = await fetch(adapters)
    assert served.digest == store.digest != before
    key = lora_b_key("block.linear")
    assert torch.equal(served.adapter.tensors[key], 2 * adapter().tensors[key])
    assert adapters.memory.bytes == (await store.info("tenant", "run", 0)).size


@pytest.mark.parametrize(("limit", "most"), [("_CACHED_BYTES", 2 * 4 * (2 * 3 + 4 * 2)), ("_CACHED_ADAPTERS", 2)])
async def test_decoded_adapters_are_kept_while_they_are_held_and_then_up_to_a_bound(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await three_versions()
    monkeypatch.setattr(f"solrl_rollout.engine.adapters.{limit}", most)
    adapters = adapters_of(store)
    held = [await fetch(adapters, version) for version in (0, 1, 0, 2, 0)]
    again = [await fetch(adapters, version) for version in (0, 1, 2)]
    assert store.reads == 3
    assert [one.adapter for one in again] == [held[place].adapter for place in (0, 1, 3)]
    await fetch(adapters, 0)
    del held, again
    while len(adapters._decoded) > 2:  # the thread that decoded a version may still hold it for a moment
        gc.collect()
        await asyncio.sleep(0.01)
    await fetch(adapters, 2)
    assert store.reads == 3
    await fetch(adapters, 1)
    assert store.reads == 4


async def test_adapters_that_requests_hold_are_bounded() -> None:
    store = await three_versions()
    size = (await store.info("tenant", "run", 0)).size
    adapters = adapters_of(store, 2 * size)
    held = [await fetch(adapters, version) for version in (0, 0, 0, 1)]
    with pytest.raises(Refusal) as refused:
        await fetch(adapters, 2)
    assert (refused.value.problem.got, refused.value.problem.expected) == (size, "at most 0 bytes now")
    assert refused.value.headers == {"Retry-After": "5"}
    held.pop().release()
    third = await fetch(adapters, 2)
    third.release()
    third.release()
    for one in held[1:]:
        one.release()
    await fetch(adapters, 1)
    await fetch(adapters)


async def test_a_tenant_holds_no_more_than_its_part() -> None:
    held = AdapterMemory(limit=100, tenant_limit=60)
    first = held.reserve("a", ("mini", "x"), 50)
    with pytest.raises(Refusal) as refused:
        held.reserve("a", ("mini", "y"), 20)
    assert "tenant's requests have 50 bytes" in refused.value.problem.detail
    others = held.reserve("b", ("mini", "x"), 50)
    with pytest.raises(Refusal) as refused:
        held.reserve("c", ("mini", "x"), 1)
    assert "all requests have 100 bytes" in refused.value.problem.detail
    first()
    assert held.bytes == 50
    others()
    assert held.bytes == 0
