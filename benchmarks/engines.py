"""Candidates per second of the engines: `python benchmarks/engines.py --engine solrl --weights FOLDER`, on a GPU.

FLUX.1 at true size with random weights, written to FOLDER (38 GB) if missing. Every engine runs in its own environment
and adds its rows, one per precision; run them on one machine. Writes docs/results/engines.{json,md}.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.generator import CHUNK_SIZE
from solrl_engine.backend import Backend, GenerationRequest, VersionedAdapter
from solrl_proto.rollouts import Plan
from solrl_rollout.engine.backends import load_backend
from solrl_rollout.settings import Settings
from true_size import written

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["solrl", "vllm-omni"], required=True)
    parser.add_argument("--precision", choices=["bf16", "fp8"], nargs="+", default=["bf16"])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--engine-options", type=json.loads, default={}, help="as of `solrl-rollout serve`")
    parser.add_argument("--device", default="cuda", help="cpu tries it out on a miniature")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    model, _ = written(args.weights, args.device)
    for precision in args.precision:
        settings = Settings(
            model=(str(model),),
            device=args.device,
            precision=precision,
            engine=args.engine,
            engine_options=args.engine_options,
        )
        row = measure(settings, args.rounds)
        print(row, file=sys.stderr, flush=True)
        write(args.out, "CPU" if args.device == "cpu" else torch.cuda.get_device_name(), row)


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
        adapters = [random_adapter(backend, seed) for seed in range(rounds)]
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


def random_adapter(backend: Backend, seed: int) -> VersionedAdapter:
    """An adapter of all LoRA targets."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in backend.identity.adapter_layout.items():
        tensors[lora_a_key(module)] = torch.randn(RANK, inputs, generator=draw) * 0.02
        tensors[lora_b_key(module)] = torch.randn(outputs, RANK, generator=draw) * 0.02
    digest = hashlib.sha256(f"adapter {seed}".encode()).hexdigest()
    return VersionedAdapter(f"sha256:{digest}", Adapter(RANK, 2.0 * RANK, tensors))


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the device has finished this work."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def write(out: Path, device: str, row: Row) -> None:
    """Replace the engine's row of this precision, and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "engines.json"
    rows = [Row(**each) for each in json.loads(file.read_text())["rows"]] if file.is_file() else []
    rows = [each for each in rows if (each.engine, each.precision) != (row.engine, row.precision)] + [row]
    file.write_text(json.dumps({"device": device, "rows": [asdict(each) for each in rows]}, indent=1) + "\n")
    (out / "engines.md").write_text(table(device, rows))
    print(table(device, rows))


def table(device: str, rows: list[Row]) -> str:
    """Markdown page."""
    lines = [
        "# Our engine and vLLM-Omni",
        "",
        f"By `python benchmarks/engines.py` on {device}: FLUX.1 512×512 px, random weights, chunks of {CHUNK_SIZE}",
        f"candidates with {STEPS} steps, decoded and copied to host memory, and adapters of rank {RANK}. Medians; each",
        "row is a run of its own, and each engine has an environment of its own.",
        "",
        "| engine | precision | candidates/s | with an adapter | adapter change, s | loading, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = [f"{CHUNK_SIZE / statistics.median(seconds):.2f}" for seconds in (row.base, row.adapted)]
        change = f"{statistics.median(row.change):.2f}"
        lines.append(f"| {row.engine} | {row.precision} | {' | '.join(rates)} | {change} | {row.loading:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
