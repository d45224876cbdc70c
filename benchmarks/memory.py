"""Planned and measured memory at the real models' shapes: `python benchmarks/memory.py`, on a CUDA GPU.

Plans each model from its configurations, then builds it on the GPU with random weights, serves one batch at each
precision, and compares the peak of allocated memory. Each model runs in a separate process. Writes
benchmarks/results/memory.{json,md}, where rows of other models and precisions stay.
"""

import argparse
import gc
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from run_memory import peaks, sizes
from solrl_core.memory_plan import plan_memory
from solrl_core.precision.support import supported_precisions
from solrl_core.sampling.generator import Generator
from support.random_weights import materialize
from support.results import Row, device_name, measure_models, shown_size, table
from support.true_size import size_of, skeleton

MODELS = {
    "flux": 24,
    "sd3": 8,
    "sana": 24,
    "sd3-medium": 24,
    "z-image": 24,
    "qwen-image": 24,
    "flux2-klein": 24,
    "wan": 8,
    "wan-14b": 4,
}
"""Model → candidates per batch."""


HEAD = ("model", "size", "batch", "precision", "planned, GiB", "measured, GiB", "difference", "reserved, GiB")


def main() -> None:
    tiers = "precisions; by default all that the GPU supports"
    measure_models(
        "memory",
        __doc__,
        list(MODELS),
        measure,
        page,
        "model",
        "precision",
        further=lambda parser: parser.add_argument("--tiers", nargs="+", help=tiers),
    )


def page(found: Mapping[str, Any]) -> str:
    rows = sorted(found["rows"], key=lambda row: list(MODELS).index(row["model"]))
    lines = [
        "# Planned and measured memory",
        "",
        f"By `python benchmarks/memory.py` on one {rows[0]['device']}: random weights at true size, one batch served.",
        "Planned is computed from configurations alone; measured is the peak of allocated tensors; reserved is the",
        "memory that CUDA's allocator held at that time.",
        "",
        *table(HEAD, ((r["model"], shown_size(r["size"]), r["batch"], r["precision"], *sizes(r)) for r in rows)),
    ]
    return "\n".join(lines) + "\n"


def measure(family: str, args: argparse.Namespace) -> Iterator[Row]:
    """Measure one model; yields a row per precision."""
    batch, device = MODELS[family], args.device
    tiers = args.tiers or supported_precisions(torch.device(device))
    with tempfile.TemporaryDirectory() as folder:
        plans = {tier: plan_memory(skeleton(family, Path(folder), device), [tier], batch) for tier in tiers}
        backbone = materialize(skeleton(family, Path(folder), device), device)
        for tier in tiers:
            gc.collect()
            if device != "cpu":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            generator = Generator(backbone, tier)
            generator.generate("a " * 600, range(batch), steps=2)  # as many tokens as the model reads
            measured, reserved = peaks(device)
            yield {
                "model": family,
                "device": device_name(device),
                "size": size_of(backbone),
                "batch": batch,
                "precision": tier,
                # One prompt is encoded here; a full cache of them is planned.
                "planned": (plans[tier].total - plans[tier].prompts) / 2**30,
                "measured": measured / 2**30,
                "reserved": reserved / 2**30,
            }
            del generator


if __name__ == "__main__":
    main()
