"""Overload: a burst of ten times the queue's capacity, then a stream at ten times the service's throughput."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from common import GROUP, counters, percentile, request, service
from support.targets import Row

_TIMES = 10
_SAMPLED = 0.25
"""Seconds between two samples of the queue."""
_OPENED = 3.0
"""Seconds between opening a connection and sending its request: trainers hold open connections."""


@dataclass
class Answers:
    """Outcomes of requests: seconds of each refusal, candidates of each accepted one, status of any other."""

    refused: list[float] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        """Number of requests that were neither refused nor answered in full."""
        return len(self.other) + sum(made != GROUP for made in self.made)


def overload(limit: int, seconds: float) -> Row:
    """Measure the latency of refusals, the largest queue, and lost requests.

    The target applies to the stream, because overload is a rate. The requests of a burst wait for each other.

    Args:
        limit: limit of the queue in candidates.
        seconds: duration of the stream.
    """
    burst_size = _TIMES * limit // GROUP
    with service("--queue-limit", str(limit)) as url:
        with _depths(url) as depths:
            burst = asyncio.run(_ask(url, [0.0] * burst_size))
            served = sum(burst.made) / burst.seconds
            every = GROUP / (_TIMES * served)
            stream = asyncio.run(_ask(url, [i * every for i in range(int(seconds / every))]))
        held = max(depths)
    p99s = [percentile(answers.refused, 0.99) for answers in (burst, stream)]
    lost = burst.lost + stream.lost
    return Row(
        "10× overload",
        f"p99 of refusals ≤ 50 ms at {_TIMES} × the throughput; queue limit never exceeded; 0 accepted requests lost",
        f"{_TIMES} × the throughput for {seconds:.0f} s: p99 {1000 * p99s[1]:.0f} ms of {len(stream.refused)} "
        f"refusals; burst of {burst_size} requests: p99 {1000 * p99s[0]:.0f} ms of {len(burst.refused)} refusals; "
        f"at most {held:.0f} of {limit} waiting ({len(depths)} samples); {lost} lost",
        p99s[1] <= 0.05 and held <= limit and lost == 0,
        {
            "burst_refused_seconds": sorted(burst.refused),
            "burst_accepted": len(burst.made),
            "served_a_second": served,
            "stream_refused_seconds": sorted(stream.refused),
            "stream_accepted": len(stream.made),
            "depth_samples": len(depths),
            "most_waiting": held,
            "lost": lost,
        },
    )


async def _ask(url: str, at: list[float]) -> Answers:
    """Send each request on its own connection, `at` seconds after the start.

    Uses bare sockets: an HTTP library's millisecond per request would count towards the refusals of a burst.
    """
    answers, address = Answers(), httpx.URL(url)
    began = time.perf_counter() + _OPENED

    async def ask(i: int, body: bytes) -> None:
        await asyncio.sleep(began + at[i] - _OPENED - time.perf_counter())
        reader, writer = await asyncio.open_connection(address.host, address.port)
        await asyncio.sleep(began + at[i] - time.perf_counter())
        sent = time.perf_counter()
        writer.write(body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        took, status = time.perf_counter() - sent, int(head.split()[1])
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:"))
        answer = json.loads(await reader.readexactly(length))
        writer.close()
        if status == 429:
            answers.refused.append(took)
        elif status == 200:
            answers.made.append(len(answer["groups"][0]["scores"]))
        else:
            answers.other.append(status)

    await asyncio.gather(*(ask(i, _bytes(i)) for i in range(len(at))))
    answers.seconds = time.perf_counter() - began
    return answers


def _bytes(i: int) -> bytes:
    body = request(None, 1, GROUP, root=i).model_dump_json(exclude_none=True).encode()
    head = "POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def _depths(url: str) -> Iterator[list[float]]:
    """Sample the number of waiting candidates from the service's metrics."""
    found, over = [0.0], threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLED):
            found.append(counters(url).get("solrl_queue_candidates", 0.0))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
