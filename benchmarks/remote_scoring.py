"""Generation beside a slow reward server: `python benchmarks/remote_scoring.py`.

Two engines with one worker each take turns on equal chunks: one has a reward that costs nothing, the other asks a
server in another process, which answers each chunk after `--latency` times the seconds in which a chunk is generated.
It answers any number at a time, so it keeps up. Writes docs/results/remote_scoring.json.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import httpx
import torch
import uvicorn
from solrl_core.generator import CHUNK_SIZE
from solrl_core.rewards.wire import decode_scoring
from solrl_proto.scores import RewardInfo, RewardList, ScoreAnswer, ScoreTimings
from solrl_rollout.engine.engine import Engine
from solrl_rollout.settings import Settings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from support.ports import free_port
from workers import LOCAL, made, running, workers_of

NAME, FREE = "patient", "remote_scoring:free"
DIGEST = f"sha256:{0:064x}"
WANTED = 0.97


def free(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """No score, at no cost."""
    return torch.zeros(len(images))


def serve(port: int, seconds: float) -> None:
    """Answer requests for scores after so many seconds, all at a time."""

    async def rewards(_: Request) -> Response:
        listed = RewardList(rewards=(RewardInfo(name=NAME, digest=DIGEST, parameters=None),))
        return Response(listed.model_dump_json(), media_type="application/json")

    async def scores(request: Request) -> Response:
        images, _ = decode_scoring(await request.body())
        await asyncio.sleep(seconds)
        timings = ScoreTimings(queued=0.0, score=seconds)
        answer = ScoreAnswer(scores={NAME: (0.0,) * len(images)}, digests={NAME: DIGEST}, seconds=timings)
        return Response(answer.model_dump_json(), media_type="application/json")

    routes = [Route("/v1/rewards", rewards), Route("/v1/scores", scores, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), port=port, log_config=None)


@contextmanager
def serving(seconds: float) -> Iterator[str]:
    """The address of such a server in a process of its own."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port, seconds), daemon=True)
    process.start()
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{address}/v1/rewards")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Measure, print the result and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mini-sana")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--latency", type=float, default=2.1, help="seconds of an answer per seconds of a chunk")
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=16, help="per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    common = {"model": (args.model,), "precision": args.precision, "device": args.device}
    alone = Settings(**common, rewards=(FREE,))
    with ExitStack() as stack:
        local = stack.enter_context(running(workers_of(LOCAL, args, alone), alone))
        rate(local, alone, args.chunks)
        seconds = args.latency * CHUNK_SIZE / rate(local, alone, args.chunks)
        address = stack.enter_context(serving(seconds))
        asking = Settings(**common, rewards=(f"{NAME}@{address}",), scoring_in_flight=args.in_flight)
        remote = stack.enter_context(running(workers_of(LOCAL, args, asking), asking))
        rate(remote, asking, args.chunks)
        rates: dict[str, list[float]] = {"free": [], "server": []}
        turns = [("free", local, alone), ("server", remote, asking)]
        for number in range(args.rounds):
            for name, engine, settings in turns[:: 1 if number % 2 else -1]:
                rates[name].append(rate(engine, settings, args.chunks))
                print(f"{name}, round {number + 1}: {rates[name][-1]:.2f} candidates/s", file=sys.stderr, flush=True)
    ratios = [server / free for server, free in zip(rates["server"], rates["free"], strict=True)]
    given = {key: value for key, value in vars(args).items() if key != "out"}
    found = {"ratio": statistics.median(ratios), "wanted": WANTED, "server_seconds": seconds}
    text = json.dumps({**given, **found, "ratios": ratios, "candidates_per_second": rates}, indent=1)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "remote_scoring.json").write_text(text + "\n")
    print(text)


def rate(engine: Engine, settings: Settings, count: int) -> float:
    """Candidates generated per second, from the start of the first chunk to the start of the last."""
    started = [chunk.started_at for chunk in made(engine, settings, count)]
    return (count - 1) * CHUNK_SIZE / (started[-1] - started[0])


if __name__ == "__main__":
    main()
