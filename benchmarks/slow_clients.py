"""Effect of slow clients, which never finish a request, on the response times of others.

    python benchmarks/slow_clients.py [--slow 200] [--requests 400] [--rounds 10] [--out docs/results]

Starts a service of a miniature and measures a healthy client with and without slow clients, alternately so that other
load on the machine affects both. Prints medians, 99th percentiles and their ratios. Exits with 1 if a median grows by
more than 10 % or a 99th percentile by more than 25 %.
"""

import argparse
import contextlib
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx
from support.doors import MODEL, Row, keep, service

ALLOWED = {"median": 1.10, "p99": 1.25}
"""Largest allowed ratio to the time without slow clients."""
BEGUN = (
    b"GET /v1/mod",
    b"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 90000\r\n\r\n{",
    b"PUT /v1/runs/slow/adapters/0 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n",
)
ROLLOUT = {
    "model": MODEL,
    "prompts": [{"id": "p", "text": "a red circle"}],
    "candidates": {"count": 2, "seed_root": 1},
    "plan": {"steps": 1},
    "rewards": [{"name": "clipscore"}],
}


@contextlib.contextmanager
def slow_clients(port: int, count: int) -> Iterator[None]:
    """Run `count` slow clients, in a process of their own: a thread would slow the healthy client down itself."""
    context = multiprocessing.get_context("spawn")
    begun, over = context.Event(), context.Event()
    process = context.Process(target=trickle, args=(port, count, begun, over))
    process.start()
    try:
        if not begun.wait(60):
            raise RuntimeError("the slow clients did not start")
        yield
    finally:
        over.set()
        process.join()


def trickle(port: int, count: int, begun: Event, over: Event) -> None:
    """Send one byte per second from each of `count` clients, which reconnect when they are cut off."""
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
        begun.set()
    for sock in socks:
        if sock is not None:
            sock.close()


def measure(port: int, requests: int) -> dict[str, list[float]]:
    """Seconds of each request of a healthy client, by kind of request."""
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


def main() -> int:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    asked = parser.parse_args()
    alone: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    with service() as running:
        measure(running.port, 40)
        for turn in range(asked.rounds):
            # Alternate the order, so that a machine that slows down affects both.
            for slow in (False, True) if turn % 2 == 0 else (True, False):
                with slow_clients(running.port, asked.slow) if slow else contextlib.nullcontext():
                    measured = measure(running.port, asked.requests)
                for name, seconds in measured.items():
                    (beside if slow else alone).setdefault(name, []).extend(seconds)
    results, ratios = {}, dict.fromkeys(ALLOWED, 0.0)
    print(f"{'':20}{'alone, ms':>20}{f'with {asked.slow} slow, ms':>24}{'ratio':>16}")
    for name in alone:
        rows = [(statistics.median(s), statistics.quantiles(s, n=100)[98]) for s in (alone[name], beside[name])]
        results[name] = {"alone": rows[0], "beside": rows[1], "requests": len(alone[name])}
        for i, kind in enumerate(ALLOWED):
            a, b = rows[0][i] * 1e3, rows[1][i] * 1e3
            ratios[kind] = max(ratios[kind], b / a)
            print(f"{name if not i else '':20}{kind:8}{a:12.2f}{b:24.2f}{b / a:16.3f}")
    counted = " and ".join(f"{len(seconds)} {name}" for name, seconds in alone.items())
    row = Row(
        f"with {asked.slow} slow clients, a healthy client's median grows ≤ 10 %, p99 ≤ 25 %",
        f"median {ratios['median'] - 1:+.1%}, p99 {ratios['p99'] - 1:+.1%}, the worse of {counted}",
        all(ratios[kind] <= most for kind, most in ALLOWED.items()),
        {"slow": asked.slow, "seconds": results, "ratios": ratios},
    )
    return keep(asked.out, "slow_clients.py", row)


if __name__ == "__main__":
    sys.exit(main())
