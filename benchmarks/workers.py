"""Candidates per second of several worker processes against one: `python benchmarks/workers.py`.

Three engines get the same chunks: one worker in this process, one worker process, and N worker processes, of which all
have the same number of threads unless `--share-cores` gives each of them its part of one worker's. On a CPU the engines
take turns, so that all see the same load on the machine; on GPUs, one is loaded after another. With `--true-size
FOLDER` the model is FLUX.1 with random weights, written to that folder, with a reward of HPSv2's size.

Writes benchmarks/results/workers.{json,md}; settings that did not run this time keep their last result.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_proto.rollouts import Plan, PromptItem
from solrl_rollout.engine.backends import load_backend
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.work import Chunk, Job
from solrl_rollout.engine.workers import Worker, process_workers
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from support.results import Results, device_name, in_turns, options, table
from support.true_size import written

MODEL, STEPS = "mini-sana", 6
LOCAL, PROCESS = "one in the service's process", "one process"
HEAD = (
    *("workers on", "model", "in the service's process", "one process", "several"),
    *("several / one", "one / in the service's"),
)
TITLES = {
    "gpus": "{device}, one for each worker",
    "own-cores": "{cores} CPU cores, {threads} threads for each worker",
    "shared-cores": "{cores} CPU cores, {threads} threads in all",
}
"""Hardware of the workers → its row of the table, formatted with the result."""


def main() -> None:
    args = arguments()
    results = Results("workers", args.out, page)
    if not args.render:
        setting = "gpus" if args.device == "cuda" else "shared-cores" if args.share_cores else "own-cores"
        results.found[setting] = measured(args)
        results.write()
    results.show()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The result of the setting that is asked for."""
    torch.set_num_threads(args.threads)
    settings = settings_of(args)
    several = f"{args.workers} processes"
    names = [LOCAL, PROCESS, several]
    rates: dict[str, list[float]] = {}
    for together in [names] if args.device == "cpu" else [[name] for name in names]:
        with ExitStack() as stack:
            works = {}
            for name in together:
                engine = stack.enter_context(running(workers_of(name, args, settings), settings))
                count = args.chunks * (args.workers if name == several else 1)
                works[name] = lambda _, engine=engine, count=count: measure(engine, settings, count)
            rates |= in_turns(works, args.rounds)
    return {
        "device": device_name(args.device),
        "cores": len(os.sched_getaffinity(0)),
        "threads": args.threads,
        "share_cores": args.share_cores,
        "model": "FLUX.1, random weights" if args.true_size else MODEL,
        "precision": args.precision,
        "steps": STEPS,
        "candidates_per_round_and_worker": args.chunks * CHUNK_SIZE,
        "ratios": {
            f"{PROCESS} / {LOCAL.removeprefix('one ')}": ratio(rates[PROCESS], rates[LOCAL]),
            f"{several} / {PROCESS}": ratio(rates[several], rates[PROCESS]),
        },
        "candidates_per_second": rates,
    }


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of one worker on a CPU")
    parser.add_argument("--share-cores", action="store_true", help="each of several has its part of these threads")
    parser.add_argument("--chunks", type=int, default=8, help="per worker and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--true-size", type=Path, help="use FLUX.1 with random weights, written to this folder")
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> RolloutSettings:
    chosen: dict[str, Any] = {"model": (MODEL,), "rewards": ("clipscore",)}
    if args.true_size:
        model, options = written(args.true_size, args.device)
        chosen = {"model": (str(model),), "rewards": ("hpsv2",), "reward_options": options}
    return RolloutSettings(**chosen, device=args.device, precision=args.precision)


def workers_of(name: str, args: argparse.Namespace, settings: RolloutSettings) -> list[Worker]:
    """The workers of an engine, not loaded."""
    if name == LOCAL:
        return [LocalWorker(settings, RolloutMetrics(), load_backend)]
    number = 1 if name == PROCESS else args.workers
    threads = max(1, args.threads // number) if args.share_cores else args.threads
    devices = [f"cuda:{i}" if args.device == "cuda" else "cpu" for i in range(number)]
    with patch.dict(os.environ, OMP_NUM_THREADS=str(threads)):
        return process_workers(settings, devices, RolloutMetrics(), load_backend)


@contextmanager
def running(workers: Sequence[Worker], settings: RolloutSettings) -> Iterator[Engine]:
    """An engine with its models loaded and warm."""
    engine = Engine(settings, RolloutMetrics(), workers)
    try:
        engine.start().result()
        yield engine
    finally:
        engine.close()
        if settings.device == "cuda":
            torch.cuda.empty_cache()


def measure(engine: Engine, settings: RolloutSettings, count: int) -> float:
    """Candidates per second of this many equal chunks, with seeds of their own."""
    plan = Plan(steps=STEPS, precision=settings.precision)
    name, rewards = settings.models[0].name, settings.reward_names
    job = Job("local", None, name, None, settings.precision, plan, rewards, images=False)  # type: ignore[arg-type]
    prompt = PromptItem(id="speed", text="a red circle and a blue square")
    chunks = [Chunk(job, prompt, range(i * CHUNK_SIZE, (i + 1) * CHUNK_SIZE)) for i in range(count)]
    start = time.perf_counter()
    engine.scheduler.submit(chunks)
    for chunk in chunks:
        chunk.result.result()
    return count * CHUNK_SIZE / (time.perf_counter() - start)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "# Several workers",
        "",
        "By `python benchmarks/workers.py`: candidates per second of one worker in the service's process, of one",
        "worker process, and of several. Medians; ratios are medians of each round's ratio.",
        "",
        *table(HEAD, (_cells(name, found[name]) for name in TITLES if name in found)),
    ]
    return "\n".join(lines) + "\n"


def _cells(name: str, result: Mapping[str, Any]) -> Sequence[str]:
    rates = result["candidates_per_second"]
    medians = [f"{statistics.median(of_one):.2f}" for of_one in rates.values()]
    medians[-1] += f" ({list(rates)[-1]})"
    process, several = result["ratios"].values()
    model = f"{result['model']}, {result['precision']}, {result['steps']} steps"
    return TITLES[name].format(**result), model, *medians, f"{several:.3f}", f"{process:.3f}"


if __name__ == "__main__":
    main()
