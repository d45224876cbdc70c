"""A rollout service that can be killed and restarted, and notes its chunks."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from tests.support.ports import free_port
from tests.support.programs import Program

from fault_trials.child import serve
from fault_trials.event_log import EventLog


class RolloutService:
    """`solrl-rollout serve` on a fixed port, on which it can be killed and restarted.

    Attributes:
        port, url: its address.
        event_log: events of its chunks.
        http: a client.
        environment: additional variables of its process.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.event_log = EventLog(folder / f"events-{self.port}.jsonl")
        self.http = httpx.Client(base_url=self.url, timeout=300)
        self._log = folder / f"service-{self.port}.log"
        self._flags = flags
        self.environment: dict[str, str] = {}
        self._program: Program | None = None

    def start(self) -> None:
        argv = ["serve", "--model", "mini-sana", "--port", str(self.port), *self._flags]
        self._program = Program(serve, (argv, str(self.event_log.path), self.environment), self._log)
        while self._program.alive:
            with suppress(httpx.TransportError):
                if self.http.get("/health/ready").status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the service ended during its start:\n{self._log.read_text(errors='replace')[-3000:]}")

    @property
    def pid(self) -> int:
        """Process id; the service must be running."""
        assert self._program is not None
        return self._program.pid

    def kill(self) -> None:
        """Send SIGKILL; does nothing if the service is not running."""
        if self._program is not None:
            self._program.kill()
            self._program = None


@contextmanager
def rollout_service(*flags: str) -> Iterator[RolloutService]:
    """Run a service; it is killed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="solrl-service-") as folder:
        service = RolloutService(Path(folder), *flags)
        try:
            service.start()
            yield service
        finally:
            service.http.close()
            service.kill()
