"""Speed of torch's attention kernels at the models' shapes: `python benchmarks/attention.py`.

The service uses the kernel that torch chooses; this shows whether another would be faster. Writes
docs/results/attention.{json,md}.
"""

import argparse
import json
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {
    "FLUX.1, 512 px, batch 24": (24, 24, 1024 + 128, 1024 + 128, 128),
    "SD3.5-L, 1024 px, batch 8": (8, 38, 4096 + 333, 4096 + 333, 64),
    "SD3.5-L, image tokens only": (8, 38, 4096, 4096, 64),
    "SANA, cross-attention, batch 24": (24, 20, 1024, 300, 112),
}
"""Name → (batch, heads, queries, keys, head size)."""
BACKENDS = {
    "chosen by torch": None,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ROUNDS, CALLS = 5, 10


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    rows = [row for name in SHAPES for row in measure(name)]
    device = torch.cuda.get_device_name()
    lines = [
        "# Attention",
        "",
        f"By `python benchmarks/attention.py` on one {device}, torch {torch.__version__}, BF16, no mask. Medians of",
        f"{ROUNDS} interleaved rounds of {CALLS} calls.",
        "",
        "| shape | kernel | ms | TFLOP/s |",
        "|---|---|---|---|",
    ]
    for row in rows:
        figures = f"{row['ms']:.3f} | {row['tflops']:.0f}" if "ms" in row else f"{row['failed']} |"
        lines.append(f"| {row['shape']} | {row['kernel']} | {figures} |")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "attention.json").write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")
    (args.out / "attention.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def measure(name: str) -> list[dict[str, Any]]:
    """Time all kernels at one shape, interleaved; a row per kernel."""
    batch, heads, queries, keys, size = SHAPES[name]
    # Like in the models: heads are adjacent in memory.
    query = torch.randn(batch, queries, heads, size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = (
        torch.randn(batch, keys, heads, size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)
    )
    rows: dict[str, dict[str, Any]] = {kernel: {"shape": name, "kernel": kernel} for kernel in BACKENDS}
    times: dict[str, list[float]] = {kernel: [] for kernel in BACKENDS}
    for turn in range(ROUNDS + 1):
        for kernel, backend in BACKENDS.items():
            if "failed" in rows[kernel]:
                continue
            try:
                seconds = call(query, key, value, backend)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                rows[kernel]["failed"] = "not supported"
                continue
            if turn:
                times[kernel].append(seconds)
    for kernel, row in rows.items():
        if times[kernel]:
            row["ms"] = 1000 * statistics.median(times[kernel])
            row["tflops"] = 4 * batch * heads * queries * keys * size / row["ms"] / 1e9
    return list(rows.values())


def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: SDPBackend | None) -> float:
    """Seconds per call, by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        start.record()
        for _ in range(CALLS):
            F.scaled_dot_product_attention(query, key, value)
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / CALLS


if __name__ == "__main__":
    main()
