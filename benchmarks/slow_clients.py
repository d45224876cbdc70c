"""What clients that take for ever over a request do to the others.

    python benchmarks/slow_clients.py [--slow 200] [--requests 400] [--rounds 4] [--out slow.json]

Starts a service of a miniature, measures a healthy client's times without and with slow clients beside it, in turns
so that whatever else the machine does hits both alike, and prints medians, 99th percentiles and their ratios.
"""

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

MODEL = "mini-sana"
BEGUN = (
    b"GET /v1/mod",
    b"POST /v1/rollouts HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n\r\n{",
    b"PUT /v1/runs/slow/adapters/0 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
)
ROLLOUT = {
    "model": MODEL,
    "prompts": [{"id": "p", "text": "a red circle"}],
    "candidates": {"count": 2, "seed_root": 1},
    "plan": {"steps": 1},
    "rewards": [{"name": "clipscore"}],
}


@contextlib.contextmanager
def service() -> Iterator[int]:
    """Port of a service."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("solrl-rollout")), "serve", "--model", MODEL, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                        break
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def slow_clients(port: int, count: int) -> Iterator[None]:
    """`count` clients that send a byte a second each, and come back when they are cut."""
    over = threading.Event()

    def trickle() -> None:
        socks: list[socket.socket | None] = [None] * count
        while not over.is_set():
            for i, sock in enumerate(socks):
                try:
                    if sock is None:
                        sock = socks[i] = socket.create_connection(("127.0.0.1", port))
                        sock.sendall(BEGUN[i % len(BEGUN)])
                    else:
                        sock.sendall(b"1\r\nx\r\n" if i % len(BEGUN) == 2 else b"x")
                except OSError:
                    socks[i] = None
                if over.wait(1 / count):
                    break
        for sock in socks:
            if sock is not None:
                sock.close()

    thread = threading.Thread(target=trickle)
    thread.start()
    time.sleep(2)
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(port: int, requests: int) -> dict[str, list[float]]:
    """Seconds of each of a healthy client's requests, by kind."""
    seconds: dict[str, list[float]] = {"GET /v1/models": [], "POST /v1/rollouts": []}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        for i in range(requests):
            started = time.perf_counter()
            if i % 4:
                client.get("/v1/models").raise_for_status()
                seconds["GET /v1/models"].append(time.perf_counter() - started)
            else:
                client.post("/v1/rollouts", json=ROLLOUT).raise_for_status()
                seconds["POST /v1/rollouts"].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    alone: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    with service() as port:
        measure(port, 40)
        for _ in range(asked.rounds):
            for name, seconds in measure(port, asked.requests).items():
                alone.setdefault(name, []).extend(seconds)
            with slow_clients(port, asked.slow):
                for name, seconds in measure(port, asked.requests).items():
                    beside.setdefault(name, []).extend(seconds)
    results = {}
    print(f"{'':20}{'alone, ms':>20}{f'beside {asked.slow} slow, ms':>24}{'ratio':>16}")
    for name in alone:
        rows = [(statistics.median(s), statistics.quantiles(s, n=100)[98]) for s in (alone[name], beside[name])]
        results[name] = {"alone": rows[0], "beside": rows[1], "requests": len(alone[name])}
        for i, kind in enumerate(("median", "p99")):
            a, b = rows[0][i] * 1e3, rows[1][i] * 1e3
            print(f"{name if not i else '':20}{kind:8}{a:12.2f}{b:24.2f}{b / a:16.3f}")
    if asked.out is not None:
        asked.out.write_text(json.dumps({"slow": asked.slow, "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
