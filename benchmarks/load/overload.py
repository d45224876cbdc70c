"""Ten times as much as the queue holds in one instant, and then ten times as much as is served for a while."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from common import Row, percentile, request, service

_GROUP = 24
_TIMES = 10
_SAMPLED = 0.05
_OPENED = 3.0
"""Seconds before its request that a connection is opened, as trainers hold them."""
_WAITING = re.compile(r"^solrl_queue_candidates\{.*\} (\S+)$", re.MULTILINE)


@dataclass
class Answers:
    """What came of the requests: seconds of the refusals, candidates of what was accepted, and whatever else."""

    refused: list[float] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        """Requests that were neither refused nor answered in full."""
        return len(self.other) + sum(made != _GROUP for made in self.made)


def overload(limit: int, seconds: float) -> Row:
    """Latency of refusals, the queue's bound, and whether anything that was accepted is lost.

    Overload is a rate: it is the stream by which refusals are judged. What one instant asks waits for itself.

    Args:
        limit: candidates that may wait.
        seconds: for which more is asked than is served.
    """
    burst_size = _TIMES * limit // _GROUP
    with service("--queue-limit", str(limit)) as url:
        with _depths(url) as depths:
            burst = asyncio.run(_ask(url, [0.0] * burst_size))
            served = sum(burst.made) / burst.seconds
            every = _GROUP / (_TIMES * served)
            stream = asyncio.run(_ask(url, [i * every for i in range(int(seconds / every))]))
        held = max(depths)
    p99s = [percentile(answers.refused, 0.99) for answers in (burst, stream)]
    lost = burst.lost + stream.lost
    return Row(
        "10× overload",
        f"refusals' p99 ≤ 50 ms while {_TIMES} × what is served is asked; bound never exceeded; 0 accepted lost",
        f"{_TIMES} × what is served for {seconds:.0f} s: p99 {1000 * p99s[1]:.0f} ms of {len(stream.refused)}; "
        f"{burst_size} requests in one instant: p99 {1000 * p99s[0]:.0f} ms of {len(burst.refused)}; "
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
    """Ask on a connection each, so many seconds after the first request.

    By bare sockets: a library's millisecond a request would be charged to the refusals of a burst.
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
    body = request(None, 1, _GROUP, root=i).model_dump_json(exclude_none=True).encode()
    head = "POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def _depths(url: str) -> Iterator[list[float]]:
    """Candidates that wait, read from the service's metrics again and again."""
    found, over = [0.0], threading.Event()

    def sample() -> None:
        client = httpx.Client(base_url=url, timeout=60)
        while not over.wait(_SAMPLED):
            said = client.get("/metrics").text
            found.append(sum(float(waiting) for waiting in _WAITING.findall(said)))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
