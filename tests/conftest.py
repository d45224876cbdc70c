"""Fixtures that several test folders use: a real Redis, and the event loop for async tests."""

import os
from collections.abc import Iterator

import pytest
import redis
from support.redis_server import RedisServer, running_redis

# Before torch is imported: tests and the services they start share few cores; idle threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a Redis that all tests of this process share; use `empty_redis_url` for one without keys."""
    with running_redis("never") as server:
        yield server.url


@pytest.fixture
def empty_redis_url(redis_url: str) -> str:
    """URL of the shared Redis, emptied for this test."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis for one test that means to stop it."""
    with running_redis("never") as server:
        yield server


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
