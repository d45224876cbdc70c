"""A real redis-server that can be killed and restarted on the same port and folder."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.support.ports import free_port

Keys = dict[bytes, tuple[bool, Any]]
"""Content of a server: key → (whether it expires, value)."""


class RedisServer:
    """A server on `port` with its append-only file in `folder`; appendfsync `never` disables the file."""

    def __init__(self, folder: Path, appendfsync: str = "always") -> None:
        self.folder = folder
        self.appendfsync = appendfsync
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = os.environ.get("REDIS_SERVER") or shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("redis-server is not installed (apt-get install redis-server, or set REDIS_SERVER)")
        append = ["--appendonly", "no"]
        if self.appendfsync != "never":
            append = ["--appendonly", "yes", "--appendfsync", self.appendfsync]
        place = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            command = [program, *place, *append, "--save", "", "--loglevel", "warning"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    if client.info("server")["process_id"] == self._process.pid:
                        return
                except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                    if time.monotonic() > deadline or self._process.poll() is not None:
                        raise RuntimeError((self.folder / "log").read_text(errors="replace")) from None
                time.sleep(0.005)

    def kill(self) -> None:
        """Send SIGKILL; does nothing if the server is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def wait_until_written(self) -> None:
        """Wait until the file holds all writes: under everysec, Redis buffers them in memory during an fsync."""
        with redis.Redis.from_url(self.url) as client:
            while client.info("persistence").get("aof_buffer_length", 0):
                time.sleep(0.005)

    def version(self) -> str:
        with redis.Redis.from_url(self.url) as client:
            return str(client.info("server")["redis_version"])


@contextmanager
def running_redis(appendfsync: str = "always") -> Iterator[RedisServer]:
    """Run a server until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="solrl-redis-", ignore_cleanup_errors=True) as folder:
        server = RedisServer(Path(folder), appendfsync)
        try:
            server.start()
            yield server
        finally:
            server.kill()


def dump(url: str) -> Keys:
    """Read all keys: whether each expires, and its value."""
    with redis.Redis.from_url(url) as client:
        read = {b"string": client.get, b"hash": client.hgetall, b"set": client.smembers}
        return {bytes(key): (client.ttl(key) >= 0, read[client.type(key)](key)) for key in client.scan_iter()}
