"""Helpers of the store tests."""

from collections.abc import Awaitable

import pytest
from solrl_proto.adapters import AdapterInfo
from solrl_proto.problems import Problem, ProblemError
from solrl_rollout.store import RunStore
from tests.support.adapters import stored_version

TENANT = "tenant-a"


def adapter(
    version: int, parent: int | None, text: str = "", run: str = "run-a", model: str = "mini", body: bytes = b""
) -> tuple[AdapterInfo, bytes]:
    body = body or f"{version} {text}".encode()
    return stored_version(body, run=run, version=version, parent=parent, model=model)


async def fill(store: RunStore, count: int, run: str = "run-a") -> None:
    """Put versions 0 to count - 1."""
    for version in range(count):
        await store.put(TENANT, *adapter(version, version - 1 if version else None, run=run))


async def refusal(doing: Awaitable[object]) -> Problem:
    """What HTTP says about the error that ends `doing`."""
    with pytest.raises(ProblemError) as caught:
        await doing
    return caught.value.problem


async def kept(store: RunStore, run: str = "run-a") -> list[int]:
    return [info.version for info in (await store.list(TENANT, run)).versions]
