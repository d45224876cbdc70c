"""Ten times as much as the queue holds, all at once."""

import asyncio
import time

import httpx
from common import Row, counters, percentile, request, service

LIMIT = 960
_GROUP = 96


def overload() -> Row:
    """Latency of refusals, the queue's bound, and whether anything that was accepted is lost."""
    with service("--queue-limit", str(LIMIT)) as url:
        return asyncio.run(_overload(url))


async def _overload(url: str) -> Row:
    answered: list[tuple[int, float, int]] = []
    depth: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def ask(i: int) -> None:
            body = request(None, 1, _GROUP, root=i).model_dump_json(exclude_none=True)
            start = time.perf_counter()
            answer = await client.post("/v1/rollouts", content=body, headers={"Content-Type": "application/json"})
            took = time.perf_counter() - start
            made = len(answer.json()["groups"][0]["scores"]) if answer.is_success else 0
            answered.append((answer.status_code, took, made))

        # A connection each beforehand, as trainers hold them.
        await asyncio.gather(*(client.get("/health/live") for _ in range(10 * LIMIT // _GROUP)))
        asking = []
        for i in range(10 * LIMIT // _GROUP):
            asking.append(asyncio.create_task(ask(i)))
            await asyncio.sleep(0.02)
            if i % 10 == 0:
                depth.append((await asyncio.to_thread(counters, url)).get("solrl_queue_candidates", 0.0))
        await asyncio.gather(*asking)
    refused = [took for status, took, _ in answered if status == 429]
    accepted = [made for status, _, made in answered if status == 200]
    other = [status for status, _, _ in answered if status not in (200, 429)]
    lost = sum(made != _GROUP for made in accepted) + len(other)
    p99 = percentile(refused, 0.99)
    return Row(
        "10× overload",
        "refusals' p99 ≤ 50 ms; bound never exceeded; 0 accepted lost",
        f"p99 {1000 * p99:.0f} ms of {len(refused)}; at most {max(depth):.0f} of {LIMIT} waiting; {lost} lost",
        p99 <= 0.05 and max(depth) <= LIMIT and lost == 0,
        {"refused_seconds": refused, "accepted": len(accepted), "depth": depth, "lost": lost},
    )
