"""Oversized request bodies and heads: whether the service refuses them, and how much memory that takes.

    python benchmarks/oversize.py [--limit 64] [--out docs/results]

Exits with 1 if one is not refused, or takes more memory than the limit plus 64 MiB.
"""

import argparse
import contextlib
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from support.doors import MODEL, Row, Service, keep, service

MIB = 2**20
MARGIN = 64 * MIB
TIMES = 4
"""Size of a body, in multiples of the limit."""
BOMBS = (40_000, 200_000, 5_000_000)
"""Sizes of oversized heads in bytes."""
AT_ONCE = 100
_DIGEST = "Content-Digest: sha-256=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:\r\n"
_HUNG_UP = 0


def send_body(port: int, target: str, size: int, chunked: bool) -> int:
    """Send a body of `size` bytes; return the status of the answer."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    media_type = ADAPTER_MEDIA_TYPE if target.startswith("PUT") else "application/json"
    head = f"{target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\n{_DIGEST}{length}\r\n\r\n"
    part = b"x" * MIB
    with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        sock.sendall(head.encode())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(size // MIB):
                sock.sendall(b"%x\r\n%b\r\n" % (MIB, part) if chunked else part)
        return _status(sock)


def send_head(port: int, where: str, size: int) -> int:
    """Send a head of `size` bytes; return the status of the answer, 0 if the service closes the connection first."""
    head = {
        "a header": "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Bomb: " + "x" * size,
        "headers": "GET /v1/models HTTP/1.1\r\nHost: localhost" + "\r\nX: y" * (size // 6),
        "the path": f"GET /v1/{'x' * size} HTTP/1.1\r\nHost: localhost",
        "the query": f"GET /v1/models?{'x' * size} HTTP/1.1\r\nHost: localhost",
    }[where]
    with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        try:
            sock.sendall(head.encode() + b"\r\n\r\n")
            return _status(sock)
        except (BrokenPipeError, ConnectionResetError):
            return _HUNG_UP


def _status(sock: socket.socket) -> int:
    with sock.makefile("rb") as stream:
        line = stream.readline()
    return int(line.split()[1]) if line else _HUNG_UP


def peak(running: Service, work: Callable[[], list[int]]) -> tuple[list[int], int]:
    """Run `work`; return its result and the peak increase of the service's memory in bytes."""
    status = Path(f"/proc/{running.pid}/status")

    def memory(kind: str) -> int:
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(kind))

    # Reset the peak, so that loading the model does not hide what follows.
    Path(f"/proc/{running.pid}/clear_refs").write_text("5")
    before = memory("VmRSS")
    return work(), memory("VmHWM") - before


def main() -> int:
    """Send oversized requests, print and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=int, default=64, help="largest allowed body in MiB")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    asked = parser.parse_args()
    limit = asked.limit * MIB
    bodies: dict[str, tuple[list[int], int]] = {}
    heads: dict[str, tuple[list[int], int]] = {}
    with service("--max-body-bytes", str(limit), "--max-adapter-bytes", str(limit)) as running:
        port = running.port
        for target in ("POST /v1/rollouts", f"PUT /v1/runs/big/adapters/0?model={MODEL}"):
            for how, chunked in (("declared", False), ("without a length", True)):
                name = f"{target.split()[0]}, {how}"
                bodies[name] = peak(running, lambda t=target, c=chunked: [send_body(port, t, TIMES * limit, c)])
                print(f"{name:40} {bodies[name][0]} {bodies[name][1] / MIB:+8.1f} MiB", flush=True)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for where in ("a header", "headers", "the path", "the query"):
                for size in BOMBS:
                    name = f"{size:,} bytes of {where}, {AT_ONCE} at once"
                    heads[name] = peak(
                        running, lambda w=where, s=size: list(pool.map(lambda _: send_head(port, w, s), range(AT_ONCE)))
                    )
                    statuses = sorted(set(heads[name][0]))
                    print(f"{name:40} {statuses} {heads[name][1] / MIB:+8.1f} MiB", flush=True)
    wrong = [status for statuses, _ in bodies.values() for status in statuses if status != 413]
    wrong += [status for statuses, _ in heads.values() for status in statuses if status not in (400, 431, _HUNG_UP)]
    most = {of: max(size for _, size in found.values()) for of, found in (("bodies", bodies), ("heads", heads))}
    row = Row(
        f"413 for bodies, 400 or 431 for heads; at most {asked.limit} MiB (the limit) + {MARGIN // MIB} MiB of memory",
        f"{len(bodies)} bodies of {TIMES * asked.limit} MiB, with and without a length: at most "
        f"{most['bodies'] / MIB:+.1f} MiB; {len(heads)} times {AT_ONCE} heads of 40 kB to 5 MB at once: at most "
        f"{most['heads'] / MIB:+.1f} MiB; {len(wrong)} wrong answers",
        not wrong and max(most.values()) <= limit + MARGIN,
        {
            "peak_mib": {name: round(size / MIB, 1) for name, (_, size) in (bodies | heads).items()},
            "statuses": {name: sorted(set(statuses)) for name, (statuses, _) in (bodies | heads).items()},
        },
    )
    return keep(asked.out, "oversize.py", row)


if __name__ == "__main__":
    sys.exit(main())
