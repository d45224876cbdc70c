"""Planned and measured memory at the real models' shapes: `python benchmarks/memory.py`, on a CUDA GPU.

Plans each model from its configurations, then builds it on the GPU with random weights, serves one batch at each
precision, and compares the peak of allocated memory. Writes docs/results/memory.{json,md}, where rows of other models
and precisions stay.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from run_memory import peaks
from solrl_core.families.skeleton import materialize
from solrl_core.generator import Generator
from solrl_core.memory import plan_memory
from solrl_core.precision import supported_tiers
from true_size import skeleton

MODELS = {
    "flux": 24,
    "sd3": 8,
    "sana": 24,
    "sd3-medium": 24,
    "z-image": 24,
    "qwen-image": 24,
    "flux2-klein": 24,
}
"""Model → candidates per batch."""


def main() -> None:
    """Measure all models, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tiers", nargs="+", help="precisions; by default all that the GPU supports")
    parser.add_argument("--device", default="cuda", help="cpu is a trial on the miniatures, without measurements")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("found no CUDA GPU; expected one: `solrl-rollout memory` plans without a GPU")
    device = torch.cuda.get_device_name() if on_gpu else "CPU, the miniatures"
    args.out.mkdir(parents=True, exist_ok=True)
    stored = args.out / "memory.json"
    found = json.loads(stored.read_text()) if stored.is_file() else {}
    rows = found["rows"] if found.get("device") == device else []
    for family in args.models:
        for row in measure(family, args.tiers or supported_tiers(torch.device(args.device)), args.device):
            same = [old for old in rows if (old["model"], old["precision"]) == (family, row["precision"])]
            rows = [old for old in rows if old not in same] + [row]
            rows.sort(key=lambda one: list(MODELS).index(one["model"]))
            stored.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")
            (args.out / "memory.md").write_text("\n".join(page(device, rows)) + "\n")
    print("\n".join(page(device, rows)))


def page(device: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of the page."""
    lines = [
        "# Planned and measured memory",
        "",
        f"By `python benchmarks/memory.py` on one {device}: random weights at true size, one batch served. Planned is",
        "computed from configurations alone; measured is the peak of allocated tensors; reserved is the memory that",
        "CUDA's allocator held at that time.",
        "",
        "| model | size | batch | precision | planned, GiB | measured, GiB | difference | reserved, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r['model']} | {r['size']} px | {r['batch']} | {r['precision']} | {r['planned']:.2f} | {r['measured']:.2f} "
        f"| {r['planned'] / r['measured'] - 1:+.1%} | {r['reserved']:.2f} |"
        for r in rows
    ]


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
                "size": backbone.width,
                "batch": batch,
                "precision": tier,
                # One prompt is encoded here; a full cache of them is planned.
                "planned": (plans[tier].total - plans[tier].prompts) / 2**30,
                "measured": measured / 2**30,
                "reserved": reserved / 2**30,
            }
            print(row, file=sys.stderr, flush=True)
            yield row
            del generator


if __name__ == "__main__":
    main()
