"""A rollout service of this machine, as a child process that ends with the program."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from solrl_client.connections import http_client

_READY_SECONDS = 600.0
"""On a GPU a service compiles at its start."""


@contextmanager
def rollout_service(
    model: str,
    log: Path,
    rewards: Sequence[str] = ("clipscore",),
    flags: Sequence[str] = (),
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Run `solrl-rollout serve` as a child process, with additional `flags`; yields its URL, stops it with SIGTERM.

    On Linux it also ends if the thread that started it is killed. `meanwhile` is called while the service starts.

    Raises:
        RuntimeError: the service did not become ready, or did not stop cleanly; includes the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "solrl_rollout", "serve", "--model", model, "--port", str(port)]
    with _child([*command, "--rewards", *rewards, *flags], log) as service:
        meanwhile()
        _wait_until_ready(url, service, log)
        yield url
    if service.returncode != 0:
        raise RuntimeError(f"the rollout service ended with {service.returncode}; the end of {log}:\n{_tail(log)}")


@contextmanager
def _child(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in `log`. At the end it gets SIGTERM, and SIGKILL a minute later."""
    # setpriv is part of util-linux. A child that outlives its parent would keep its memory and port.
    bound = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen([*bound, *command], stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, service: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if service.poll() is not None:
            raise RuntimeError(f"the rollout service exited during its start; the end of {log}:\n{_tail(log)}")
        try:
            with http_client(url, timeout=5) as client:
                if client.get("/health/ready").is_success:
                    return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise RuntimeError(f"the rollout service was not ready in {_READY_SECONDS:.0f} s; the end of {log}:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
