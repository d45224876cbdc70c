"""Twenty minutes at full load: requests of all sizes, pushes, clients that leave."""

import random
import socket
import threading
import time

import httpx
import redis
from common import MODEL, Row, client_of, counters, random_adapter, redis_server, request, service
from solrl_core.families import load_backbone
from solrl_core.lora import adapter_layout

CLIENTS = 4
RETAIN = 3


def soak(seconds: float) -> Row:
    """Growth of the service's memory after a tenth of the time, and the number of keys in Redis."""
    with redis_server() as port, service("--redis-url", f"redis://127.0.0.1:{port}/0", "--retain", str(RETAIN)) as url:
        return _soak(url, redis.Redis(port=port), seconds)


def _soak(url: str, keys: redis.Redis, seconds: float) -> Row:
    backbone = load_backbone(MODEL)
    layout = adapter_layout(backbone.transformer, backbone.lora_targets)
    bodies = [random_adapter(layout, rank=4, seed=seed) for seed in range(3)]
    stop = threading.Event()
    faults: list[BaseException] = []

    def work(number: int) -> None:
        dice, run = random.Random(number), f"soak-{number}"
        try:
            with client_of(url) as client:
                version = 0
                while not stop.is_set():
                    client.push(run, version, version - 1 if version else None, MODEL, bodies[version % 3])
                    for _ in range(3):
                        asked = request(run, dice.randint(1, 4), dice.choice((4, 24, 96)), root=dice.randrange(10**6))
                        asked = asked.model_copy(
                            update={"adapter": asked.adapter.model_copy(update={"version": version})}  # type: ignore[union-attr]
                        )
                        client.rollouts(asked)
                    _leave(url, request(None, 4, 96, root=dice.randrange(10**6)).model_dump_json(exclude_none=True))
                    version += 1
        except BaseException as error:
            faults.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    memory: list[float] = []
    count: list[int] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds and not stop.wait(5.0):
        memory.append(counters(url)["process_resident_memory_bytes"] / 2**20)
        count.append(sum(1 for key in keys.scan_iter() if keys.ttl(key) < 0))
    stop.set()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    warm = max(2, len(memory) // 10)
    tail = max(2, len(memory) // 10)
    growth = sum(memory[-tail:]) / tail - max(memory[:warm])
    steady = set(count[warm:])
    return Row(
        f"soak, {seconds / 60:.0f} minutes",
        "memory grows ≤ 10 MiB after warm-up; Redis keys constant",
        f"{growth:+.1f} MiB; {' to '.join(map(str, sorted({min(steady), max(steady)})))} keys",
        growth <= 10 and max(steady) - min(steady) <= CLIENTS,
        {"memory_mib": memory, "keys": count, "requests": counters(url).get("solrl_http_requests_total")},
    )


def _leave(url: str, body: str) -> None:
    """Ask, and hang up at once."""
    host, port = httpx.URL(url).host, httpx.URL(url).port or 80
    head = f"POST /v1/rollouts HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, port)) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.2)
