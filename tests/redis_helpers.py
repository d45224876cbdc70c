"""A real Redis for tests."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis


@dataclass(frozen=True)
class RedisServer:
    """A running redis-server and its URL."""

    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End the server and wait until it is gone."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    """A redis-server of our own on a free loopback port, without persistence."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.fail("redis-server is not installed; the tests run a real one (apt-get install redis-server)")
    with tempfile.TemporaryDirectory(prefix="solrl-redis-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = [
            "--bind",
            "127.0.0.1",
            "--port",
            str(port),
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            folder,
        ]
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen([program, *options], stdout=output, stderr=subprocess.STDOUT)
        server = RedisServer(f"redis://127.0.0.1:{port}/0", process)
        try:
            _wait_until_ready(server, log)
            yield server
        finally:
            server.stop()


def _wait_until_ready(server: RedisServer, log: Path) -> None:
    deadline = time.monotonic() + 30
    with redis.Redis.from_url(server.url) as client:
        while time.monotonic() < deadline and server.process.poll() is None:
            try:
                # The pid, lest another program took the port between our look and the start.
                if client.info("server")["process_id"] == server.process.pid:
                    return
            except redis.ConnectionError:
                time.sleep(0.02)
    pytest.fail(f"redis-server did not come up at {server.url}:\n{log.read_text(errors='replace')}")
