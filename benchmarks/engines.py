"""Candidates per second of the engines: `python benchmarks/engines.py --engine solrl --weights FOLDER`, on a GPU.

FLUX.1 at true size with random weights, written to FOLDER (38 GB) if missing. Every engine runs in its own environment
and adds its rows, one per precision; run them on one machine. Writes docs/results/engines.{json,md}.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_engine.backend import Backend, GenerationRequest, VersionedAdapter
from solrl_proto.rollouts import Plan
from solrl_rollout.engine.backends import load_backend
from solrl_rollout.settings import Settings
from support.adapters import random_adapter
from support.results import Results, device_name, options, table
from support.true_size import written

STEPS = 6
RANK = 32
WARM_UP = 2


@dataclass(frozen=True)
class Row:
    """An engine at one precision. Times are seconds, medians but for `loading`.

    Attributes:
        engine: its name, with the version of an engine that is not ours.
        precision: how it computes.
        loading: of the model, without compiling.
        base: of a chunk without an adapter.
        adapted: of a chunk with an adapter.
        change: of changing the adapter.
        effect: mean absolute difference of an image's values that the adapter makes.
    """

    engine: str
    precision: str
    loading: float
    base: list[float]
    adapted: list[float]
    change: list[float]
    effect: float


def main() -> None:
    """Measure an engine; print the table of all and write it."""
    parser = options(__doc__, device="cuda")
    parser.add_argument("--engine", choices=["solrl", "vllm-omni"], default="solrl")
    parser.add_argument("--precision", choices=["bf16", "fp8"], nargs="+", default=["bf16"])
    parser.add_argument("--weights", type=Path, default=Path("runs/true_size"))
    parser.add_argument("--engine-options", type=json.loads, default={}, help="as of `solrl-rollout serve`")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    results = Results("engines", args.out, page)
    if args.render:
        return results.show()
    model, _ = written(args.weights, args.device)
    results.found["device"] = device_name(args.device)
    for precision in args.precision:
        settings = Settings(
            model=(str(model),),
            device=args.device,
            precision=precision,
            engine=args.engine,
            engine_options=args.engine_options,
        )
        results.add(asdict(measure(settings, args.rounds)), "engine", "precision")
    return results.show()


def measure(settings: Settings, rounds: int) -> Row:
    """Load a backend and time it."""
    began = time.perf_counter()
    backend = load_backend(settings.models[0], settings)
    loading = time.perf_counter() - began
    try:
        tier = settings.precision
        assert tier in {"bf16", "fp8"}
        backend.set_adapter(tier, None)
        before = generate(backend, settings)
        base = [timed(lambda: generate(backend, settings)) for _ in range(WARM_UP + rounds)]
        adapters = [versioned_adapter(backend, seed) for seed in range(rounds)]
        change = [timed(lambda each=each: backend.set_adapter(tier, each)) for each in adapters]  # type: ignore[misc]
        after = generate(backend, settings)
        adapted = [timed(lambda: generate(backend, settings)) for _ in range(WARM_UP + rounds)]
        (info,) = (info for info in backend.capabilities.precisions if info.precision == tier)
    finally:
        backend.close()
    if not before.isfinite().all() or not after.isfinite().all():
        raise RuntimeError("got images that are not finite")
    name = settings.engine if settings.engine == "solrl" else f"{settings.engine} {version(settings.engine)}"
    effect = float((after - before).abs().mean())
    return Row(name, f"{tier}: {info.how}", loading, base[WARM_UP:], adapted[WARM_UP:], change, effect)


def generate(backend: Backend, settings: Settings) -> torch.Tensor:
    """Images of a chunk [24, 3, H, W] in [0, 1], on the CPU."""
    precision: Any = settings.precision
    plan = Plan(steps=STEPS, precision=precision)
    prompt, seeds = "a red circle and a blue square", range(CHUNK_SIZE)
    request = GenerationRequest([prompt] * len(seeds), seeds, plan, precision)
    images = backend.generate(request, CHUNK_SIZE).images.cpu()
    return images / 255 if images.dtype == torch.uint8 else images


def versioned_adapter(backend: Backend, seed: int) -> VersionedAdapter:
    """A random adapter under a digest of its own."""
    digest = hashlib.sha256(f"adapter {seed}".encode()).hexdigest()
    adapter = random_adapter(backend.identity.adapter_layout, seed, rank=RANK, size=0.03)
    return VersionedAdapter(f"sha256:{digest}", adapter)


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the device has finished this work."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def page(found: Mapping[str, Any]) -> str:
    """Markdown page."""
    head = ("engine", "precision", "candidates/s", "with an adapter", "adapter change, s", "loading, s")
    lines = [
        "# Our engine and vLLM-Omni",
        "",
        f"By `python benchmarks/engines.py` on {found['device']}: FLUX.1 512×512 px, random weights, chunks"
        f" of {CHUNK_SIZE}",
        f"candidates with {STEPS} steps, decoded and copied to host memory, and adapters of rank {RANK}. Medians; each",
        "row is a run of its own, and each engine has an environment of its own.",
        "",
        *table(head, (_cells(Row(**row)) for row in found["rows"])),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> Sequence[str]:
    rates = (f"{CHUNK_SIZE / statistics.median(seconds):.2f}" for seconds in (row.base, row.adapted))
    return row.engine, row.precision, *rates, f"{statistics.median(row.change):.2f}", f"{row.loading:.0f}"


if __name__ == "__main__":
    main()
