"""Planned and measured memory at the real models' shapes: `python benchmarks/memory.py`, on a CUDA GPU.

Plans each model from its configurations, then builds it on the GPU with random weights, serves one batch at each
precision, and compares the peak of allocated memory. Writes benchmarks/results/memory.{json,md}, where rows of other
models and precisions stay.
"""

import gc
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from run_memory import peaks, sizes
from solrl_core.memory_plan import plan_memory
from solrl_core.precision import supported_precisions
from solrl_core.sampling.generator import Generator
from support.random_weights import materialize
from support.results import Results, device_name, options, shown_size, table
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
    """Measure all models, print the table and write it."""
    parser = options(__doc__, device="cuda")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tiers", nargs="+", help="precisions; by default all that the GPU supports")
    args = parser.parse_args()
    if not args.render and args.device != "cpu" and not torch.cuda.is_available():
        sys.exit("found no CUDA GPU; expected one: `solrl-rollout memory` plans without a GPU")
    results = Results("memory", args.out, page)
    if not args.render and results.found.get("device") != (device := device_name(args.device)):
        results.found = {"device": device, "rows": []}
    for family in () if args.render else args.models:
        for row in measure(family, args.tiers or supported_precisions(torch.device(args.device)), args.device):
            results.add(row, "model", "precision")
    results.show()


def page(found: Mapping[str, Any]) -> str:
    """Markdown page."""
    rows = sorted(found["rows"], key=lambda row: list(MODELS).index(row["model"]))
    lines = [
        "# Planned and measured memory",
        "",
        f"By `python benchmarks/memory.py` on one {found['device']}: random weights at true size, one batch served."
        " Planned is",
        "computed from configurations alone; measured is the peak of allocated tensors; reserved is the memory that",
        "CUDA's allocator held at that time.",
        "",
        *table(HEAD, ((r["model"], shown_size(r["size"]), r["batch"], r["precision"], *sizes(r)) for r in rows)),
    ]
    return "\n".join(lines) + "\n"


def measure(family: str, tiers: Sequence[str], device: str) -> Iterator[dict[str, Any]]:
    """Measure one model; yields a row per precision."""
    batch = MODELS[family]
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
            row = {
                "model": family,
                "size": size_of(backbone),
                "batch": batch,
                "precision": tier,
                # One prompt is encoded here; a full cache of them is planned.
                "planned": (plans[tier].total - plans[tier].prompts) / 2**30,
                "measured": measured / 2**30,
                "reserved": reserved / 2**30,
            }
            yield row
            del generator


if __name__ == "__main__":
    main()
