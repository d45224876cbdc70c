"""Services and trainers as real processes that can be killed.

They are forked from a process that has already imported them, which makes starts cheap, and run the entry points of
their commands.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from support.ports import free_port

from fault_trials.event_log import EventLog

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *("solrl_rollout.cli", "solrl_rollout.serve", "solrl_rollout.http.app"),
        *("solrl_trainer.commands.cli", "solrl_trainer.commands.run"),
        # Modules that are imported only when a model is loaded.
        *("diffusers.models.transformers", "diffusers.pipelines.sana.pipeline_sana", "solrl_minis.catalog"),
        *("transformers.models.clip.modeling_clip", "transformers.models.clip.image_processing_pil_clip"),
        *("transformers.models.clip.tokenization_clip", "matplotlib.pyplot"),
    ]
)


class Program:
    """A process that runs `target(*arguments)` with its output redirected to `log`."""

    def __init__(self, target: Any, arguments: Sequence[Any], log: Path) -> None:
        from fault_trials.child import started

        self.log = log
        # Daemonic, so that it does not outlive the trials.
        self._process = _CONTEXT.Process(target=started, args=(target, tuple(arguments), str(log)), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float = 600) -> int:
        """Wait for the exit code; negative if a signal killed the process."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(self.log.read_text(errors="replace")[-2000:])
        return self._process.exitcode


class RankPrograms(Program):
    """torchrun with ranks of one run on this machine that run `target(*arguments)`, with one thread each."""

    def __init__(self, size: int, target: Any, arguments: Sequence[Any], log: Path) -> None:
        from fault_trials.child import as_ranks

        self.size = size
        super().__init__(as_ranks, (size, free_port(), target, *arguments), log)

    def send(self, rank: int, number: int) -> None:
        ranks = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[-self.size :]
        os.kill(int(ranks[rank]), number)

    def stop(self) -> None:
        self.send_signal(signal.SIGTERM)
        self.wait()


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
        from fault_trials.child import serve

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
