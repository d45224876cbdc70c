"""Redis, a browser and the event loop for tests of several folders; `--unit` leaves out tests that start programs."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.support import fork_server, gpu_tests
from tests.support.browser import Browser, running_browser
from tests.support.redis_server import RedisServer, running_redis

# Before torch is imported: tests and the services they start share few cores, so each process has one thread of torch,
# and idle threads must not spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Before Ray is imported, which reads it then.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# A shell that runs the tests in the background has them ignore Ctrl-C, and so the programs that they interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

PROGRAMS = {"redis-server", "chromium", "chromium-browser", "google-chrome", "solrl-rollout", "solrl-train", "serve"}
"""Names and commands of programs that `--unit` starts none of."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unit", action="store_true", help="leave out slow tests and those that start PROGRAMS")
    parser.addoption("--gpu", type=Path, metavar="FILE", help="run tests marked `gpu` alone; FILE records them")
    parser.addoption("--release", action="store_true", help="do not leave out tests that are marked `release`")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    if config.getoption("--unit"):
        sys.addaudithook(_skip_programs)
    if (record := config.getoption("--gpu")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(gpu_tests.Record(record))


def pytest_collection_finish() -> None:
    """Leave the imported modules out of all later collections of garbage, each of which would search them."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[object]:
    """Have programs fork from this process as it is before the first test, if any test may start one."""
    if "tests.support.programs" in sys.modules and not session.config.pluginmanager.hasplugin("dsession"):
        fork_server.fork()
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("gpu"):
        if lack := gpu_tests.lacking(*mark.args):
            pytest.skip(lack)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = {"slow"} if config.getoption("--unit") else set()
    marks |= set() if config.getoption("--release") else {"release"}
    left_out = [item for item in items if any(map(item.get_closest_marker, marks))]
    if config.getoption("--gpu"):
        left_out = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    # Files with slow tests come first, so that parallel processes end at about the same time.
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


def _skip_programs(event: str, arguments: tuple[Any, ...]) -> None:
    """Skip the test under way when it starts one of PROGRAMS."""
    if event not in ("subprocess.Popen", "solrl.fork"):
        return
    if found := {Path(os.fsdecode(word)).name for word in arguments[1]} & PROGRAMS:
        pytest.skip(f"starts {min(found)}")


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
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
