"""Load time and size of the status page of a service with many long experiments.

    python benchmarks/page.py [--runs 50] [--points 1000] [--rounds 5] [--out docs/results/page.json]

Fills a Redis, starts a service of a miniature on it, and opens the page in a headless Chromium without a cache.
Measures the time to the first and to the last painted curve, the bytes on the wire, and frame times while the page
scrolls and updates. In the first round the service has read none of the runs yet. Needs redis-server and Chromium.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from solrl_proto.adapters import AdapterInfo
from solrl_proto.status import IterationReport, SamplePair, Samples, Spread
from solrl_rollout.store import open_store
from solrl_trainer.demo import rollout_service
from solrl_trainer.status_reports import thumbnail
from support.browser import Browser, running_browser
from support.redis_server import running_redis

MODEL = "mini-sana"
VERSIONS = 8

# Records the time of the first painted curve (of the run shown in full) and of the last.
WATCH = """addEventListener("DOMContentLoaded", () => {
  const painted = (name) => requestAnimationFrame(() => { window[name] ??= performance.now(); });
  const look = () => {
    const cards = document.querySelectorAll(".card").length;
    if (document.querySelector("#run .chart.axes svg")) painted("shown");
    if (cards && document.querySelectorAll(".card svg").length === cards) painted("whole");
    if (!window.whole) requestAnimationFrame(look);
  };
  look();
});"""

# Scrolls to the end and back over three seconds; returns the sorted frame times.
SCROLL = """new Promise((done) => {
  const frames = [], begun = performance.now(), far = document.documentElement.scrollHeight - innerHeight;
  let last = begun;
  const step = (now) => {
    frames.push(now - last); last = now;
    const part = (now - begun) / 3000;
    if (part >= 1) return done(frames.slice(1).sort((a, b) => a - b));
    scrollTo({top: far * Math.sin(part * Math.PI), behavior: "instant"});
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


async def fill(url: str, runs: int, points: int) -> None:
    """Store adapters, iterations and samples of `runs` runs."""
    import torch

    store = open_store(url)
    image = thumbnail(torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(1)))

    async def one(i: int) -> None:
        chance, name = random.Random(i), f"experiment-{i:02}"
        for version in range(VERSIONS):
            body = f"{name} {version}".encode() * 100
            await store.put("local", *described(name, version, body))
        for iteration in range(points):
            mean = 0.5 + 0.1 * (1 - math.exp(-iteration / 300)) + chance.gauss(0, 0.01)
            spread = Spread(mean=mean, best=mean + 0.08 + chance.random() / 50, worst=mean - 0.1)
            pair = {"prompt": "a red circle above two blue squares", "seed": 1, "proxy": 0.5, "true": 0.6}
            pairs = [SamplePair(place=p, explored=image, regenerated=image, **pair) for p in ("best", "worst") * 2]
            samples = Samples(iteration=iteration, version=0, precision="nvfp4", numerics="native", pairs=tuple(pairs))
            await store.add_iteration(
                "local",
                name,
                IterationReport(
                    iteration=iteration,
                    version=iteration + 1,
                    explored_version=iteration,
                    score=spread,
                    proxy_mean=mean - 0.02,
                    loss=1 + chance.random(),
                    rewards={"clipscore": spread, "hpsv2": spread},
                    seconds={
                        "explore": 30.1234,
                        "wait": 20.1234,
                        "regenerate": 10.1234,
                        "train": 15.1234,
                        "push": 0.1234,
                    },
                    planned=points + 1,
                    samples=samples if iteration == points - 1 else None,
                ),
            )

    for start in range(0, runs, 10):
        await asyncio.gather(*(one(i) for i in range(start, min(start + 10, runs))))
    await store.close()


def described(run: str, version: int, body: bytes) -> tuple[AdapterInfo, bytes]:
    """Metadata and body of a dummy adapter version."""
    import hashlib

    info = AdapterInfo(
        run=run,
        version=version,
        parent=version - 1 if version else None,
        model=MODEL,
        digest=f"sha256:{hashlib.sha256(body).hexdigest()}",
        size=len(body),
        modules=40,
        rank=32,
        alpha=64,
    )
    return info, body


def look(browser: Browser, url: str) -> dict[str, Any]:
    """Visit the page once and measure it."""
    with browser.page(1280, 900) as page:
        page.call("Network.setCacheDisabled", cacheDisabled=True)
        page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        page.open(f"{url}/")
        whole, shown = page.wait("window.whole", 60), page.wait("window.shown", 60)
        page.wait("document.images.length && [...document.images].every((one) => one.naturalWidth)")
        asked = {one["requestId"]: one["request"]["url"] for one in page.happened("Network.requestWillBeSent")}
        parts: Counter[str] = Counter()
        for one in page.happened("Network.loadingFinished"):
            if (address := asked[one["requestId"]]).startswith(url):
                parts[address.removeprefix(url).partition("?")[0]] += one["encodedDataLength"]
        frames = page.see(SCROLL)
        cards = page.see("document.querySelectorAll('.card svg').length")
        assert page.faults() == []
    return {
        "shown_ms": shown,
        "whole_ms": whole,
        "bytes": parts.total(),
        "parts": parts,
        "cards": cards,
        "frame_ms": {
            "median": statistics.median(frames),
            "p99": frames[int(0.99 * len(frames))],
            "longest": frames[-1],
        },
    }


def main() -> None:
    """Measure all rounds, print and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_redis("never") as redis:
        asyncio.run(fill(redis.url, asked.runs, asked.points))
        with (
            rollout_service(MODEL, Path(folder, "log"), flags=("--redis-url", redis.url)) as url,
            running_browser() as browser,
        ):
            rounds = [look(browser, url) for _ in range(asked.rounds)]
            polled = len(httpx.get(f"{url}/v1/status?since={2**53 - 1}").content)
    for one in rounds:
        frames = one["frame_ms"]
        print(
            f"shown after {one['shown_ms']:5.0f} ms, whole after {one['whole_ms']:5.0f}, "
            f"{one['bytes'] / 1000:6.1f} kB, {one['cards']} curves; "
            f"frames {frames['median']:.1f} ms, p99 {frames['p99']:.1f}, longest {frames['longest']:.1f}"
        )
    result = {
        "runs": asked.runs,
        "points": asked.points,
        "processor_cores": os.cpu_count(),
        "first_visit_shown_ms": round(rounds[0]["shown_ms"]),
        "first_visit_whole_ms": round(rounds[0]["whole_ms"]),
        "shown_ms": round(statistics.median(one["shown_ms"] for one in rounds[1:] or rounds)),
        "whole_ms": round(statistics.median(one["whole_ms"] for one in rounds[1:] or rounds)),
        "kilobytes": round(max(one["bytes"] for one in rounds) / 1000, 1),
        "kilobytes_by_request": {name: round(size / 1000, 1) for name, size in rounds[0]["parts"].items()},
        "frame_ms": {
            name: round(statistics.median(one["frame_ms"][name] for one in rounds), 1) for name in rounds[0]["frame_ms"]
        },
        "polled_kilobytes_before_compression": round(polled / 1000, 1),
    }
    print(json.dumps(result))
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
