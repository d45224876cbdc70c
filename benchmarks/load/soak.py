"""Soak test: twenty minutes of requests of all sizes, pushes, and clients that disconnect."""

import random
import socket
import statistics
import threading
import time

import httpx
import redis
from common import adapter_file, client_of, counters, request, service
from fault_trials.adapters import MODEL, layout
from solrl_client.rollouts import RolloutClient
from solrl_proto.rollouts import AdapterRef
from support.targets import Row
from tests.support.redis_server import running_redis

CLIENTS = 4
RETAIN = 3
GROWTH = 10.0
"""Largest allowed growth of memory in MiB."""
SAMPLED = 2.0
"""Seconds between two samples."""
WARM_UP = 0.15
"""Share of the time that is warm-up. The two compared windows, after it and at the end, are as long."""
_LASTING_KEYS = """
local count = 0
for _, key in ipairs(redis.call('KEYS', '*')) do
  if redis.call('TTL', key) < 0 then count = count + 1 end
end
return count
"""


def soak(seconds: float) -> Row:
    """Measure the growth of the service's memory after warm-up, and the number of keys in Redis."""
    with running_redis("everysec") as server, service("--redis-url", server.url, "--retain", str(RETAIN)) as url:
        return _soak(url, redis.Redis.from_url(server.url), seconds)


def _soak(url: str, keys: redis.Redis, seconds: float) -> Row:
    stop = threading.Event()
    faults: list[BaseException] = []

    def push(client: RolloutClient, number: int, version: int) -> None:
        body = adapter_file(layout(), rank=4, seed=1000 * number + version)
        client.push(f"soak-{number}", version, version - 1 if version else None, MODEL, body)

    def work(number: int) -> None:
        dice, version = random.Random(number), RETAIN
        try:
            with client_of(url) as client:
                while not stop.is_set():
                    push(client, number, version)
                    for _ in range(3):
                        prompts, candidates = dice.randint(1, 4), dice.choice((4, 24, 96))
                        asked = request(f"soak-{number}", prompts, candidates, root=dice.randrange(10**6))
                        newest = AdapterRef(run=f"soak-{number}", version=version)
                        client.rollouts(asked.model_copy(update={"adapter": newest}))
                    _leave(url, request(None, 4, 96, root=dice.randrange(10**6)).model_dump_json(exclude_none=True))
                    version += 1
        except BaseException as error:
            faults.append(error)
            stop.set()

    with client_of(url) as client:
        # Push as many versions as are retained, so that from the start each new one replaces an old one.
        for number in range(CLIENTS):
            for version in range(RETAIN):
                push(client, number, version)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    memory: list[float] = []
    count: list[int] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds and not stop.wait(SAMPLED):
        memory.append(counters(url)["process_resident_memory_bytes"] / 2**20)
        count.append(keys.eval(_LASTING_KEYS, 0))
    stop.set()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    warm = max(1, round(WARM_UP * len(memory)))
    first, last = _window(memory[warm : 2 * warm]), _window(memory[-warm:])
    growth = {name: last[name] - first[name] for name in first}
    steady = sorted(set(count[warm:]))
    asked = counters(url)["solrl_http_requests_total"] - len(memory)
    return Row(
        f"soak, {seconds / 60:.0f} minutes",
        "memory grows ≤ 10 MiB after warm-up, median and minimum; Redis keys constant",
        f"median {growth['median']:+.1f} MiB, minimum {growth['least']:+.1f} MiB, from the first "
        f"{WARM_UP * seconds / 60:.1f} minutes after warm-up to the last; {' to '.join(map(str, steady))} keys; "
        f"{asked:.0f} requests",
        max(growth.values()) <= GROWTH and len(steady) == 1,
        {"memory_mib": memory, "first": first, "last": last, "keys": count, "requests": asked},
    )


def _window(memory: list[float]) -> dict[str, float]:
    """Resident memory in MiB within a time window. Batches come and go; the minimum is what stays between them."""
    return {"median": statistics.median(memory), "least": min(memory)}


def _leave(url: str, body: str) -> None:
    """Send a request and disconnect before the answer."""
    host, port = httpx.URL(url).host, httpx.URL(url).port or 80
    head = f"POST /v1/rollouts HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, port)) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.2)
