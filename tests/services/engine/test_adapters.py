"""What was refused is never served: a damaged body leaves no trace under the digest that it was sent with."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solrl_core.adapter import Adapter, adapter_digest, encode_adapter, lora_a_key, lora_b_key
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import AdapterRef
from solrl_rollout.engine.adapters import Adapters
from solrl_rollout.store import MemoryRunStore

pytestmark = pytest.mark.anyio

LAYOUT = {"block.linear": (4, 3)}
HOSTED: Any = SimpleNamespace(info=SimpleNamespace(name="mini"), adapter_layout=LAYOUT)


def adapter() -> Adapter:
    tensors = {lora_a_key("block.linear"): torch.ones(2, 3), lora_b_key("block.linear"): torch.ones(4, 2)}
    return Adapter(rank=2, alpha=2.0, tensors=tensors)


async def push(adapters: Adapters, version: int, body: bytes, digest: str) -> str | None:
    """The kind of problem, if it was refused."""
    parent = version - 1 if version else None
    try:
        await adapters.push("tenant", "run", version, parent, digest, body, HOSTED)
    except ProblemError as error:
        return error.problem.kind
    return None


async def test_a_damaged_body_is_refused_and_not_remembered() -> None:
    adapters = Adapters(MemoryRunStore())
    body = encode_adapter(adapter())
    digest = adapter_digest(body)
    assert await push(adapters, 0, body, digest) is None
    assert await push(adapters, 1, body[:-1] + b"\x40", digest) == "digest-mismatch"
    served = (await adapters.fetch("tenant", AdapterRef(run="run", version=0), HOSTED)).adapter
    assert all(torch.equal(served.tensors[key], value) for key, value in adapter().tensors.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
async def test_what_is_not_finite_is_refused_and_not_stored(value: float) -> None:
    store = MemoryRunStore()
    bad = adapter()
    bad.tensors[lora_b_key("block.linear")][1, 1] = value
    body = encode_adapter(bad)
    assert await push(Adapters(store), 0, body, adapter_digest(body)) == "adapter-nonfinite"
    assert (await store.runs("tenant")).runs == ()
