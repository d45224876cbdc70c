"""Times candidate kernels beside the product's on a GPU: `python benchmarks/kernel_sweep`. Takes under three minutes.

Compiles the kernels in several processes, checks each result against plain arithmetic in float32, and times all kernels
of a case in turns. Writes docs/results/kernel_sweep.{json,md}.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

ROUNDS, CALLS = 5, 10
SECONDS = 165
"""No case begins later."""
HEAD = """# Candidate kernels

By `python benchmarks/kernel_sweep` on one {device}, torch {torch}, BF16. Medians of {rounds} rounds of {calls} calls,
in turns. The error is relative to plain arithmetic in float32, at this shape and at one that fills no block. A kernel
whose error is above the tolerance of its case is not timed.
"""


def main() -> int:
    """Measure, print and write the table; returns 1 if a case was not measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0) or not find_spec("triton"):
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        parser.error(f"got {found}; expected one of compute capability 9.0 or above, and Triton: run it on such a GPU")
    began = time.monotonic()
    workers = min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(compile_share, workers), range(workers)))
    print(f"kernels compiled in {time.monotonic() - began:.0f} s", flush=True)

    from kernel_sweep.cases import cases

    head = HEAD.format(device=torch.cuda.get_device_name(), torch=torch.__version__, rounds=ROUNDS, calls=CALLS)
    rows, missing = [], []
    for case in cases():
        if time.monotonic() - began > SECONDS:
            missing.append(case.name)
            continue
        rows += measured(case)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "kernel_sweep.json").write_text(json.dumps(rows, indent=1) + "\n")
        (args.out / "kernel_sweep.md").write_text("\n".join([head, *table(rows)]) + "\n")
        print("\n".join(table([row for row in rows if row["case"] == case.name])), flush=True)
    if missing:
        print(f"not measured within {SECONDS} s: {'; '.join(missing)}")
    return bool(missing)


@torch.no_grad()
def compile_share(workers: int, worker: int) -> None:
    """Compile every `workers`-th kernel by running it; Triton keeps the result on the disk, where `main` finds it.

    A kernel that fails here fails in `main` again, which reports it.
    """
    from kernel_sweep.cases import cases

    work = [(case, setting) for case in cases() for setting in case.settings]
    for case, setting in work[worker::workers]:
        for inputs in (case.inputs, case.odd):
            try:
                case.candidate(*inputs(), setting)
                torch.cuda.synchronize()
            except Exception as failure:
                print(f"{case.name}, {named(setting)}: {failure}"[:300], file=sys.stderr)


@torch.no_grad()
def measured(case: Any) -> list[dict[str, Any]]:
    """Check and time all kernels of a case; a row for each, the product's first."""
    from kernel_sweep.cases import error

    torch.manual_seed(0)
    inputs, odd = case.inputs(), case.odd()
    reference, odd_reference = case.reference(*inputs), case.reference(*odd)
    kernels: dict[str, Callable[..., Any]] = {"product": case.product}
    for setting in case.settings:
        kernels[named(setting)] = lambda *tensors, setting=setting: case.candidate(*tensors, setting)
    rows = {name: {"case": case.name, "kernel": name} for name in kernels}
    for name, kernel in kernels.items():
        try:
            errors = [error(kernel(*odd), odd_reference), error(kernel(*inputs), reference)]
        except Exception as failure:
            rows[name]["failed"] = f"{type(failure).__name__}: {str(failure).splitlines()[0][:120]}"
            continue
        rows[name]["errors"] = errors
        if not max(errors) <= case.tolerance:
            rows[name]["failed"] = f"differs: error {max(errors):.2g}, expected at most {case.tolerance}"
    times: dict[str, list[float]] = {name: [] for name in kernels if "failed" not in rows[name]}
    for turn in range(ROUNDS + 1):
        for name, found in times.items():
            seconds = call(kernels[name], inputs)
            if turn:
                found.append(seconds)
    for name, found in times.items():
        rows[name]["ms"] = 1000 * statistics.median(found)
    return list(rows.values())


def call(kernel: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    """Seconds per call, by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        kernel(*inputs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / CALLS


def named(setting: Any) -> str:
    """A setting in words."""
    return ", ".join(f"{name.lower().removeprefix('num_')} {value}" for name, value in setting.items())


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A table for each case, and whether a candidate is faster than the product."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        lines += ["", f"## {case[0].upper()}{case[1:]}", "", "| kernel | ms | error |", "|---|---|---|"]
        for row in own:
            figures = f"{row['ms']:.4f} | {max(row['errors']):.2g}" if "ms" in row else f"{row['failed']} |"
            lines.append(f"| {row['kernel']} | {figures} |")
        product, *candidates = [row for row in own if "ms" in row] or [{}]
        if product.get("kernel") == "product" and candidates:
            best = min(candidates, key=lambda row: row["ms"])
            gain = product["ms"] / best["ms"]
            verdict = f"{best['kernel']} takes {best['ms']:.4f} ms" if gain > 1 else "The product's is the fastest"
            lines += ["", f"{verdict}: {gain:.2f} × the speed of the product's, for the best candidate."]
    return lines


if __name__ == "__main__":
    sys.exit(main())
