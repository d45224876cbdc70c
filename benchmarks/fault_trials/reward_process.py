"""A reward service as a process, and what requests cost a service: memory, and time in which it does not answer."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from solrl_core.rewards.wire import encode_scoring
from solrl_proto.scores import SCORES_MEDIA_TYPE, ScorePrompt, ScoreRequest
from solrl_reward.cli import main
from support.ports import free_port

from fault_trials.child import command
from fault_trials.findings import Findings
from fault_trials.processes import Program

MOST_BYTES = 300 * 10**6
"""Memory that a hostile request may take, above an idle service's."""
MOST_SECONDS = 1.0
"""Within which a service must say that it is live."""


class RewardService:
    """`solrl-reward serve` in a process of its own.

    Attributes:
        url: its address.
        http: a client.
        program: the process.
    """

    def __init__(self, folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=600)
        words = ["solrl-reward", "serve", "--device", "cpu", "--port", str(port), *flags]
        given = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | (environment or {})
        self.program = Program(command, (main, words, str(folder), given), folder / f"reward-{port}.log")
        while not self._ready():
            if not self.program.alive:
                raise RuntimeError(f"the service ended during its start:\n{self.log[-3000:]}")
            time.sleep(0.1)

    @property
    def log(self) -> str:
        """Its log so far."""
        return self.program.log.read_text(errors="replace")

    def ask(self, body: bytes) -> httpx.Response:
        """The answer to a request for scores."""
        return self.http.post("/v1/scores", content=body, headers={"Content-Type": SCORES_MEDIA_TYPE})

    def _ready(self) -> bool:
        try:
            return self.http.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def reward_service(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[RewardService]:
    """Run a reward service; it is killed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="solrl-reward-") as folder:
        service = RewardService(Path(folder), *flags, environment=environment)
        try:
            yield service
        finally:
            service.http.close()
            service.program.kill()


def scoring(reward: str, count: int = 1, height: int = 32, width: int = 32) -> bytes:
    """A request for scores of images of one size."""
    prompts = tuple(ScorePrompt(text="a red circle") for _ in range(count))
    images = torch.zeros(count, 3, height, width, dtype=torch.uint8)
    return encode_scoring(images, ScoreRequest(rewards=(reward,), prompts=prompts))


@dataclass(frozen=True)
class Cost:
    """Peak memory above that before a request, in bytes, and the longest time that a service took to say it is live."""

    memory: int
    silent: float

    def judge(self, trial: str, findings: Findings) -> None:
        """Note the cost, and require that it is bounded."""
        findings.most("most memory, MB", round(self.memory / 1e6))
        findings.most("longest until live, ms", round(1000 * self.silent))
        findings.require(self.memory <= MOST_BYTES, trial, f"took {self.memory / 1e6:.0f} MB")
        findings.require(self.silent <= MOST_SECONDS, trial, f"did not say for {self.silent:.1f} s that it is live")


def cost(pid: int, url: str, request: Callable[[], httpx.Response]) -> tuple[httpx.Response, Cost]:
    """The answer to a request, and what it cost the service."""
    begun, over = threading.Event(), threading.Event()
    waited: list[float] = []
    idle = _memory(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak

    def probe() -> None:
        with httpx.Client(timeout=600) as http:
            while not over.is_set():
                began = time.monotonic()
                http.get(f"{url}/health/live")
                waited.append(time.monotonic() - began)
                begun.set()
                over.wait(0.02)

    prober = threading.Thread(target=probe)
    prober.start()
    begun.wait()
    try:
        answer = request()
    finally:
        over.set()
        prober.join()
    return answer, Cost(_memory(pid, "VmHWM") - idle, max(waited))


def _memory(pid: int, kind: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))
