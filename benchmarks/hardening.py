"""Hostile clients of one service: `python benchmarks/hardening.py [--only fuzz oversize slow held metadata]`.

- fuzz: valid and invalid requests to every route, generated from the OpenAPI document. A route without parameters has
  no invalid requests.
- oversize: memory of oversized bodies and heads, which the service must refuse.
- slow: effect of clients that never finish a request on the response times of others. Times with and without them
  alternate, so that other load on the machine affects both.
- held: memory of clients that send most of a large body and fall silent, and that come again once they are refused.
- metadata: numbers of a prompt's metadata that a reward could take for a loop or a size, and a health check beside.

Each starts a service of a miniature with limits of its own. Exits with 1 if a target is not met.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, TypeVar

import httpx
from fault_trials.adapters import MODEL, rollout_body
from solrl_http.tokens import create_token
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from solrl_trainer.commands.local_service import rollout_service
from support.fuzzing import fuzz_routes
from support.targets import Row, Rows, measure

MIB = 2**20
MARGIN = 64
"""Memory in MiB that may be used in addition to a limit."""
PIECE = 2**16
"""Bytes of a body that are sent at once."""
BODIES = tuple(itertools.product((f"PUT /v1/runs/big/adapters/0?model={MODEL}", "POST /v1/rollouts"), (False, True)))
"""Request line of a large body, and whether it is chunked."""
HEADS = {
    "a header": lambda size: "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Bomb: " + "x" * size,
    "headers": lambda size: "GET /v1/models HTTP/1.1\r\nHost: localhost" + "\r\nX: y" * (size // 6),
    "the path": lambda size: f"GET /v1/{'x' * size} HTTP/1.1\r\nHost: localhost",
    "the query": lambda size: f"GET /v1/models?{'x' * size} HTTP/1.1\r\nHost: localhost",
}
BOMBS = (40_000, 200_000, 5_000_000)
"""Sizes of oversized heads in bytes."""
AT_ONCE = 100
METADATA_MIB, LIVE_S = 300, 1.0
"""Memory that requests with hostile metadata may take, and seconds for a health check beside them."""
HUNG_UP = 0
KINDS = ("POST /v1/rollouts", "GET /v1/models")
"""A healthy client's requests: one of the first to three of the second."""
ALLOWED = {"median": 1.10, "p99": 1.25}
"""Largest allowed ratio to the time without slow clients."""
BEGUN = (
    b"GET /v1/mod",
    b"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 90000\r\n\r\n{",
    b"PUT /v1/runs/slow/adapters/0 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n",
)
ROLLOUT = rollout_body(count=2, steps=1)

Found = TypeVar("Found")


@dataclass(frozen=True)
class Service:
    """A running service process, and its port on loopback."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def peak(self, work: Coroutine[Any, Any, Found]) -> tuple[Found, float]:
        """Run `work`; return its result and the peak increase of the service's memory in MiB."""
        status = Path(f"/proc/{self.pid}/status")

        def memory(kind: str) -> float:
            return int(re.findall(rf"{kind}:\s+(\d+) kB", status.read_text())[0]) / 1024

        # Reset the peak, so that loading the model does not hide what follows.
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        before = memory("VmRSS")
        return asyncio.run(work), memory("VmHWM") - before


@contextlib.contextmanager
def service(**flags: object) -> Iterator[Service]:
    """Run a service of a miniature; RuntimeError if it does not become ready or logs a traceback."""
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", *str(value).split())]
    with tempfile.TemporaryDirectory(prefix="solrl-hardening-") as folder:
        log = Path(folder, "log")
        with rollout_service(MODEL, log, flags=words) as url:
            # The service is the youngest child of this process.
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            yield Service(int(children[-1]), int(url.rpartition(":")[2]))
        if "Traceback" in log.read_text():
            raise RuntimeError(f"the service logged a traceback:\n{log.read_text()[-5000:]}")


def fuzz(examples: int) -> Row:
    """`examples` valid and invalid requests to each route of a service with tokens."""
    with tempfile.TemporaryDirectory(prefix="solrl-fuzz-") as folder:
        tokens = Path(folder, "tokens.json")
        secret, _ = create_token(tokens, "fuzz", ("rollout", "push", "admin"), None)
        with service(token_file=tokens, queue_limit=48, max_body_bytes=MIB) as running:
            tallies, nothing_wrong = fuzz_routes(running.url, secret, examples)
    routes = {name.rpartition(" ")[0] for name in (*tallies, *nothing_wrong)}
    faults = [f"{name}\n{fault}" for name, tally in tallies.items() for fault in tally.faults]
    print(*faults, sep="\n\n")
    broken = sum(count for tally in tallies.values() for status, count in tally.answers.items() if status >= 500)
    fewest = min((tally.answers.total() for tally in tallies.values()), default=0)
    different = sum(len(tally.different) for tally in tallies.values())
    # Every route has valid requests.
    whole = tallies and all(f"{route} positive" in tallies for route in routes)
    return Row(
        "fuzz",
        f"≥ {examples:,} valid and as many invalid requests per route; no 5xx; answers conform to the OpenAPI document",
        f"{sum(tally.answers.total() for tally in tallies.values()):,} requests ({different:,} distinct) to "
        f"{len(routes)} routes, ≥ {fewest:,} valid and invalid each; {len(nothing_wrong)} routes have no invalid "
        f"requests; {broken} 5xx, {len(faults)} faults",
        bool(whole) and not faults and not broken and fewest >= examples,
        {"kinds": {name: tally.figures for name, tally in tallies.items()}, "nothing_can_be_wrong": nothing_wrong},
    )


async def send(port: int, head: str, pieces: Iterable[bytes] = ()) -> int:
    """Send a request until it is answered; return the status, HUNG_UP if the service closes the connection first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def upload() -> None:
        writer.write(head.encode() + b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    uploading = asyncio.create_task(upload())
    try:
        line = await reader.readline()
        return int(line.split()[1]) if line else HUNG_UP
    except ConnectionError:
        return HUNG_UP
    finally:
        uploading.cancel()
        await asyncio.gather(uploading, return_exceptions=True)
        writer.close()


def body(target: str, chunked: bool, size: int, missing: int = 0) -> tuple[str, Iterator[bytes]]:
    """Head of a request with a body of `size` bytes, and its pieces without the last `missing` ones."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    media_type = ADAPTER_MEDIA_TYPE if target.startswith("PUT") else "application/json"
    head = f"{target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\n{length}\r\n"
    piece = b"x" * PIECE
    chunk = b"%x\r\n%b\r\n" % (PIECE, piece) if chunked else piece
    return head + f"Content-Digest: sha-256=:{'A' * 43}=:", itertools.repeat(chunk, size // PIECE - missing)


def oversize(limit: int) -> Row:
    """Bodies of four times the limit of `limit` MiB, and heads of up to 5 MB."""

    async def heads(head: str) -> list[int]:
        return await asyncio.gather(*(send(running.port, head) for _ in range(AT_ONCE)))

    async def one_body(target: str, chunked: bool) -> list[int]:
        return [await send(running.port, *body(target, chunked, 4 * limit * MIB))]

    statuses: dict[str, list[int]] = {}
    peaks: dict[str, dict[str, float]] = {"bodies": {}, "heads": {}}

    def attack(kind: str, name: str, work: Coroutine[Any, Any, list[int]]) -> None:
        answers, peaks[kind][name] = running.peak(work)
        statuses[name] = sorted(set(answers))

    with service(max_body_bytes=limit * MIB, max_adapter_bytes=limit * MIB) as running:
        for target, chunked in BODIES:
            name = f"{target.split()[0]}, {'without a length' if chunked else 'declared'}"
            attack("bodies", name, one_body(target, chunked))
        for (where, head), size in itertools.product(HEADS.items(), BOMBS):
            attack("heads", f"{size:,} bytes of {where}, {AT_ONCE} at once", heads(head(size)))
    allowed = {"bodies": {413}, "heads": {400, 431, HUNG_UP}}
    wrong = [name for kind, names in peaks.items() for name in names if not allowed[kind].issuperset(statuses[name])]
    most = {kind: max(sizes.values()) for kind, sizes in peaks.items()}
    return Row(
        "oversize",
        f"413 for bodies, 400 or 431 for heads; at most {limit} MiB (the limit) + {MARGIN} MiB of memory",
        f"{len(BODIES)} bodies of {4 * limit} MiB, with and without a length: at most {most['bodies']:+.1f} MiB; "
        f"{len(peaks['heads'])} times {AT_ONCE} heads of 40 kB to 5 MB at once: at most {most['heads']:+.1f} MiB; "
        f"{len(wrong)} wrong answers",
        not wrong and max(most.values()) <= limit + MARGIN,
        {
            "peak_mib": {name: round(size, 1) for sizes in peaks.values() for name, size in sizes.items()},
            "statuses": statuses,
        },
    )


def trickle(port: int, count: int, begun: Event) -> None:
    """Send one byte per second from each of `count` clients, which reconnect when they are cut off."""
    socks: list[socket.socket | None] = [None] * count
    while True:
        for i, sock in enumerate(socks):
            try:
                if sock is None:
                    sock = socks[i] = socket.create_connection(("127.0.0.1", port))
                    sock.sendall(BEGUN[i % len(BEGUN)])
                else:
                    sock.sendall(b"1\r\nx\r\n" if i % len(BEGUN) == 2 else b"x")
            except OSError:
                socks[i] = None
            time.sleep(1 / count)
        begun.set()


@contextlib.contextmanager
def slow_clients(port: int, count: int) -> Iterator[None]:
    """Run `count` slow clients, in a process of their own: a thread would slow the healthy client down itself."""
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=trickle, args=(port, count, begun), daemon=True)
    process.start()
    try:
        if not begun.wait(60):
            raise RuntimeError("the slow clients did not start")
        yield
    finally:
        process.terminate()
        process.join()


def slow(count: int, requests: int, rounds: int) -> Row:
    """A healthy client's `requests` per round with and without `count` slow clients."""
    seconds: dict[str, dict[str, list[float]]] = {kind: {"alone": [], "beside": []} for kind in KINDS}

    def ask(how: str) -> None:
        for i in range(requests):
            kind = KINDS[min(i % 4, 1)]
            started = time.perf_counter()
            client.request(*kind.split(), json=None if i % 4 else ROLLOUT).raise_for_status()
            seconds[kind][how].append(time.perf_counter() - started)

    with service() as running, httpx.Client(base_url=running.url, timeout=120) as client:
        for _ in range(10):
            client.post("/v1/rollouts", json=ROLLOUT).raise_for_status()
        for turn in range(rounds):
            # Alternate the order, so that a machine that slows down affects both.
            for how in ("alone", "beside") if turn % 2 == 0 else ("beside", "alone"):
                with slow_clients(running.port, count) if how == "beside" else contextlib.nullcontext():
                    ask(how)
    results: dict[str, dict[str, Any]] = {
        kind: {how: (statistics.median(all_), statistics.quantiles(all_, n=100)[98]) for how, all_ in both.items()}
        for kind, both in seconds.items()
    }
    ratios = {
        name: max(both["beside"][i] / both["alone"][i] for both in results.values()) for i, name in enumerate(ALLOWED)
    }
    counted = " and ".join(f"{len(both['alone'])} {kind}" for kind, both in seconds.items())
    return Row(
        "slow",
        f"with {count} slow clients, a healthy client's median grows ≤ 10 %, p99 ≤ 25 %",
        f"median {ratios['median'] - 1:+.1%}, p99 {ratios['p99'] - 1:+.1%}, the worse of {counted}",
        all(ratios[kind] <= most for kind, most in ALLOWED.items()),
        {"slow": count, "seconds": results, "ratios": ratios},
    )


def held(clients: int, seconds: float, budget: int, size: int = 48) -> Row:
    """`clients` that hold bodies of `size` MiB, of a service whose budget for bodies is `budget` MiB."""
    ends: Counter[int] = Counter()
    statuses: Counter[int] = Counter()

    async def hold(target: str, chunked: bool) -> None:
        while True:
            with contextlib.suppress(OSError):
                ends[await send(running.port, *body(target, chunked, size * MIB, missing=1))] += 1
            await asyncio.sleep(0.5)

    async def healthy() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            while True:
                statuses[(await client.get("/v1/models")).status_code] += 1
                await asyncio.sleep(0.2)

    async def attack() -> None:
        holding = [hold(*BODIES[client % 3]) for client in range(clients)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(healthy(), *holding)

    limits = {"max_adapter_bytes": size * MIB, "max_body_bytes": size * MIB}
    with service(max_inflight_bytes=budget * MIB, **limits) as running:
        _, most = running.peak(attack())
    wrong = ends.keys() - {503, 408, HUNG_UP}
    unanswered = statuses.total() - statuses[200]
    return Row(
        "held",
        f"{clients} clients that hold bodies of {size} MiB take at most {budget} MiB (the budget) + {MARGIN} MiB of "
        "memory; a healthy client is answered",
        f"{most:+.1f} MiB in {seconds:.0f} s; {ends.total()} bodies ended, {ends[503]} of them refused and {ends[408]} "
        f"cut off; {len(wrong)} wrong answers; {unanswered} of {statuses.total()} healthy ones missing",
        most <= budget + MARGIN and ends[503] > 0 and statuses.total() > 0 and not (wrong or unanswered),
        {"peak_mib": round(most, 1), "ends": dict(ends), "healthy": dict(statuses)},
    )


def metadata(rounds: int) -> Row:
    """`rounds` times each of some requests whose metadata has large numbers, to a service with rewards that read it."""
    item = {"class": "circle", "color": "red", "count": 1}
    numbers = [[item | {"count": count}] for count in (10**6, 10**9, 10**30, -1, True)]
    texts = [{"include": one} for one in [*numbers, [item | {"count": 10**6}] * 100, [item] * 200]]
    statuses: Counter[int] = Counter()
    waits: list[float] = []

    async def attack(client: httpx.AsyncClient) -> None:
        for one, name in itertools.product(texts * rounds, rewards):
            prompts = [{"id": "a", "text": "x", "metadata": one}]
            body = ROLLOUT | {"prompts": prompts, "rewards": [{"name": name}]}
            statuses[(await client.post("/v1/rollouts", json=body)).status_code] += 1

    async def live(client: httpx.AsyncClient) -> None:
        while True:
            began = time.perf_counter()
            (await client.get("/health/live")).raise_for_status()
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)

    async def both() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=600) as client:
            beside = asyncio.create_task(live(client))
            await attack(client)
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    rewards = ("verifier", "verifier_graded", "judge")
    with service(rewards=" ".join(rewards)) as running:
        _, most = running.peak(both())
    longest = max(waits)
    return Row(
        "metadata",
        f"422; at most {METADATA_MIB} MiB of memory; the health check answers within {LIVE_S:g} s",
        f"{statuses.total()} requests, {statuses[422]} of them refused by 422; {most:+.1f} MiB; "
        f"{len(waits)} health checks within {longest:.2f} s",
        statuses.keys() == {422} and most <= METADATA_MIB and longest <= LIVE_S,
        {"peak_mib": round(most, 1), "statuses": dict(statuses), "longest_health_check_s": longest},
    )


ROWS: Rows = {
    "fuzz": lambda short: fuzz(2 if short else 1000),
    "oversize": lambda short: oversize(4 if short else 64),
    "slow": lambda short: slow(3, 8, 1) if short else slow(200, 400, 10),
    "held": lambda short: held(20, 8, 96) if short else held(200, 120, 256),
    "metadata": lambda short: metadata(1 if short else 20),
}
HEAD = (
    "# Hostile clients",
    "",
    "By `python benchmarks/hardening.py` (one row: `--only NAME`): a real service with the miniature SANA on loopback.",
)


main = partial(measure, "hardening", ROWS, __doc__, HEAD)

if __name__ == "__main__":
    sys.exit(main())
