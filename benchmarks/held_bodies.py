"""Memory that many clients hold which send most of a large body and then fall silent.

    python benchmarks/held_bodies.py [--clients 200] [--seconds 120] [--budget 256] [--body 48] [--out docs/results]

Each client is cut off or refused, and comes again. Exits with 1 if the service's memory grows by more than its budget
for bodies (--max-inflight-bytes) plus 64 MiB, if a client is not refused with 503 or 408, or if a healthy client is not
answered.
"""

import argparse
import contextlib
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
from oversize import MARGIN, MIB, peak
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from support.doors import MODEL, Row, keep, service

_DIGEST = "Content-Digest: sha-256=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:\r\n"
_PAUSE = 0.5
"""Seconds before a client that was refused comes again."""


def head(client: int, size: int) -> bytes:
    """The head of a client's request: an adapter with and without a length, or a rollout."""
    kind = client % 3
    target = "POST /v1/rollouts" if kind == 2 else f"PUT /v1/runs/held-{client}/adapters/0?model={MODEL}"
    media_type = "application/json" if kind == 2 else ADAPTER_MEDIA_TYPE
    length = "Transfer-Encoding: chunked" if kind == 1 else f"Content-Length: {size}"
    lines = f"{target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\n{_DIGEST}{length}\r\n\r\n"
    return lines.encode()


def hold(port: int, client: int, size: int, over: threading.Event) -> Iterator[str]:
    """Send all but the last MiB of a body again and again, each time until the service ends it; yield how it did."""
    part = b"x" * MIB if client % 3 != 1 else b"%x\r\n%b\r\n" % (MIB, b"x" * MIB)
    while not over.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            try:
                sock.sendall(head(client, size))
                for _ in range(size // MIB - 1):
                    _send(sock, part, over)
            except (BrokenPipeError, ConnectionResetError):
                pass
            yield _status(sock, over)
        over.wait(_PAUSE)


def _send(sock: socket.socket, part: bytes, over: threading.Event) -> None:
    view = memoryview(part)
    while view and not over.is_set():
        with contextlib.suppress(TimeoutError):
            view = view[sock.send(view) :]


def _status(sock: socket.socket, over: threading.Event) -> str:
    """Status of the answer, once there is one; or that there was none."""
    found = b""
    while not over.is_set():
        try:
            if not (part := sock.recv(4096)):
                break
            found += part
        except TimeoutError:
            continue
        except OSError:
            break
        if b"\r\n" in found:
            return found.split()[1].decode()
    return "still held" if over.is_set() else "hung up"


def healthy(url: str, over: threading.Event) -> list[int]:
    """Statuses of a client that asks for the models all the while."""
    statuses = []
    with httpx.Client(base_url=url, timeout=60) as client:
        while not over.wait(0.2):
            statuses.append(client.get("/v1/models").status_code)
    return statuses


def main() -> int:
    """Lease bodies, print and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--budget", type=int, default=256, help="--max-inflight-bytes in MiB")
    parser.add_argument("--body", type=int, default=48, help="size of a body in MiB")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    asked = parser.parse_args()
    ends: Counter[str] = Counter()
    statuses: list[int] = []
    over = threading.Event()
    limits = ("--max-inflight-bytes", asked.budget * MIB, "--max-adapter-bytes", asked.body * MIB)
    flags = map(str, (*limits, "--max-body-bytes", asked.body * MIB))
    with service(*flags) as running:

        def work() -> list[int]:
            def run(client: int) -> None:
                for end in hold(running.port, client, asked.body * MIB, over):
                    ends[end] += 1

            threads = [threading.Thread(target=run, args=(client,)) for client in range(asked.clients)]
            threads.append(threading.Thread(target=lambda: statuses.extend(healthy(running.url, over))))
            for thread in threads:
                thread.start()
            time.sleep(asked.seconds)
            over.set()
            for thread in threads:
                thread.join()
            return []

        _, most = peak(running, work)
    wrong = {end: count for end, count in ends.items() if end not in ("503", "408", "hung up", "still held")}
    unanswered = len([status for status in statuses if status != 200])
    row = Row(
        f"{asked.clients} clients that hold bodies of {asked.body} MiB take at most {asked.budget} MiB (the budget) + "
        f"{MARGIN // MIB} MiB of memory; a healthy client is answered",
        f"{most / MIB:+.1f} MiB in {asked.seconds:.0f} s; {ends.total()} bodies, of which {ends['503']} refused and "
        f"{ends['408']} cut off; {len(wrong)} wrong answers; {unanswered} of {len(statuses)} healthy ones missing",
        most <= asked.budget * MIB + MARGIN and ends["503"] > 0 and not (wrong or unanswered),
        {"peak_mib": round(most / MIB, 1), "ends": dict(ends), "healthy": dict(Counter(map(str, statuses)))},
    )
    return keep(asked.out, "held_bodies.py", row)


if __name__ == "__main__":
    sys.exit(main())
