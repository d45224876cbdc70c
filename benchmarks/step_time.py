"""Time of a forward pass by precision, at the real models' shapes: `python benchmarks/step_time.py`, on a GPU.

Each model runs in its own process, which builds the transformer with random weights at each precision, compiles it for
both batch sizes, and then measures all precisions interleaved, so that all run at the same clocks. Rows are written as
they are measured. Writes docs/results/step_time.{json,md,png} and step_time_where.png.
"""

import argparse
import copy
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from support.own_process import ProcessEndedError, rows_of

Row = dict[str, Any]
Run = Callable[[], Any]

BASELINE = "diffusers bf16 compiled"
ENGINE = "fp8 by transformer engine"
TIERS = (BASELINE, "bf16", "fp8", ENGINE)
ALL_TIERS = (*TIERS, "nvfp4 emulated")
SERVED = ("bf16", "fp8")
"""Precisions measured at a quarter of the batch, too."""
BATCH = {"flux": 24, "sd3": 8, "sana": 24, "sd3-medium": 24, "z-image": 24, "qwen-image": 24, "flux2-klein": 24}
TOKENS = {
    **{"flux": 128, "sd3": 205, "sana": 300, "sd3-medium": 205, "z-image": 64},
    **{"qwen-image": 256, "flux2-klein": 512},
}
"""Text tokens of the real models; the miniatures' tokenizers give fewer."""
ROUNDS = 5
KERNELS = 25
"""Number of slowest kernels to record by name."""


def main() -> None:
    """Measure each model in its own process; write and print the tables."""
    from step_time_report import render

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--tiers", nargs="+", default=TIERS, choices=ALL_TIERS)
    parser.add_argument("--device", default="cuda", help="cpu tries it out on the miniatures")
    parser.add_argument("--limit", type=float, default=110, help="time limit per model in seconds")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--render", action="store_true", help="render table and plots from the JSON, without measuring")
    args = parser.parse_args()
    if ENGINE in args.tiers and importlib.util.find_spec("transformer_engine") is None:
        args.tiers = [tier for tier in args.tiers if tier != ENGINE]
        print(f"without {ENGINE}: it is not installed", file=sys.stderr)
    if not args.tiers:
        parser.error(f"got --tiers {ENGINE!r}, which is not installed; expected any of {', '.join(ALL_TIERS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "step_time.json"
    result = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    for model in [] if args.render else args.models:
        # All rows of a model come from one run.
        result["rows"] = [row for row in result["rows"] if row["model"] != model]
        for row in measured(model, args):
            print({key: value for key, value in row.items() if key != "kernels"}, file=sys.stderr, flush=True)
            same = [old for old in result["rows"] if (old["model"], old["tier"]) == (model, row["tier"])]
            result["rows"] = [old for old in result["rows"] if old not in same] + [row]
            file.write_text(json.dumps(result, indent=1) + "\n")
    print(render(result["rows"], args.out))


def measured(model: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a model's process; a failed row if the process fails."""
    with tempfile.TemporaryDirectory() as caches:
        # Empty caches, so that compile times are real.
        kept = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        own = {"device": args.device, "limit": args.limit, "environment": kept}
        try:
            yield from rows_of(measure, model, args.tiers, args.device, **own)
        except ProcessEndedError as error:
            yield {"model": model, "tier": "all", "failed": str(error)}


def measure(model: str, tiers: list[str], device: str) -> Iterator[Row]:
    """Yield the row of each precision, once after compiling and again after measuring."""
    import torch
    from solrl_core.batches import gpu_batch_sizes
    from solrl_core.families.base import Backbone
    from solrl_core.families.skeleton import Meta
    from true_size import skeleton

    name = torch.cuda.get_device_name() if device != "cpu" else "CPU, the miniature"
    ready: list[tuple[Row, Run, Run | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        backbone = skeleton(model, Path(folder), device)
        with Meta():
            text = backbone.encode(["a"])
        backbone.device = torch.device(device)
        whole, quarter = gpu_batch_sizes(BATCH[model])
        for tier in tiers:
            row: Row = {"model": model, "tier": tier, "device": name, "size": backbone.width, "batch": whole}
            try:
                transformer = build(backbone, tier, device)
                stack = partial(Backbone.stack, backbone) if tier == BASELINE else backbone.stack
                run = step(backbone, transformer, text, whole, model, stack)
                row["compile_s"], out = timed(run, device)
                row["finite"] = bool(out.isfinite().all())
                smaller = step(backbone, transformer, text, quarter, model, stack) if tier in SERVED else None
                if smaller is not None:
                    row["compile_quarter_s"], _ = timed(smaller, device)
                ready.append((row, run, smaller))
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:400]
            yield row
            gc.collect()
        times = in_turns([run for _, run, _ in ready], device)
        for (row, run, smaller), each in zip(ready, times, strict=True):
            row["ms"], row["times_ms"] = 1000 * statistics.median(each), [round(1000 * one, 2) for one in each]
            row["launch_ms"] = 1000 * launch(run, device)
            row["kernels"] = kernels(run) if device != "cpu" else {}
            if smaller is not None:
                row["quarter_ms"] = 1000 * statistics.median(in_turns([smaller], device)[0])
            yield row


def build(backbone: Any, tier: str, device: str) -> Any:
    """Build a transformer at a precision; it compiles on its first call."""
    from solrl_core.families.base import Backbone
    from solrl_core.families.skeleton import randomize
    from solrl_core.precision import apply_policy

    transformer = randomize(copy.deepcopy(backbone.transformer), device)
    if tier not in (BASELINE, "bf16"):
        apply_policy(transformer, backbone.policy_at("fp8" if "fp8" in tier else "nvfp4"), tier)
    if device != "cpu":
        # The baseline compiles diffusers' blocks without fusion.
        (partial(Backbone.compile, backbone) if tier == BASELINE else backbone.compile)(transformer)
    return transformer


def step(
    backbone: Any, transformer: Any, text: dict[str, Any], batch: int, model: str, stack: Callable[..., dict[str, Any]]
) -> Run:
    """One forward pass over `batch` candidates of one prompt, with random latents and text, joined by `stack`."""
    import torch

    def like(row: Any) -> Any:
        tokens = [TOKENS[model]] if name_has_tokens(row) and backbone.device.type != "cpu" else row.shape[1:2]
        shape = (1, *tokens, *row.shape[2:])
        if not row.is_floating_point():
            return torch.ones(shape, dtype=row.dtype, device=backbone.device)
        return torch.randn(shape, dtype=row.dtype, device=backbone.device)

    def name_has_tokens(row: Any) -> bool:
        return row.ndim == 3 or not row.is_floating_point()  # states and mask, but not pooled embeddings

    one_prompt = {name: like(row) for name, row in text.items()}
    conditioning = stack([one_prompt] * batch)
    latents = torch.randn(batch, *backbone.latent_shape, device=backbone.device)
    sigma = torch.full((batch,), 0.7, device=backbone.device)
    run = partial(backbone.velocity, transformer, latents, sigma, conditioning)
    return torch.inference_mode()(run)


def timed(run: Run, device: str) -> tuple[float, Any]:
    """Run and synchronise; return seconds of wall-clock time and the result."""
    import torch

    began = time.perf_counter()
    out = run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began, out


def in_turns(runs: list[Run], device: str) -> list[list[float]]:
    """Time all `runs` interleaved, in `ROUNDS` rounds, by the device's clock; returns seconds per run and round.

    One more round runs first and is discarded, because matrix libraries choose their kernels in the first calls.
    """
    import torch
    from solrl_core.device_events import record_event

    here = torch.device(device)
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(-1, ROUNDS):
        for run, each in zip(runs, times, strict=True):
            before = record_event(here)
            run()
            after = record_event(here)
            after.wait()
            if turn >= 0:
                each.append(after.since(before))
    return times


def launch(run: Run, device: str) -> float:
    """Seconds of CPU time to launch a pass."""
    timed(run, device)
    began = time.perf_counter()
    run()
    asked = time.perf_counter() - began
    timed(run, device)
    return asked


def kernels(run: Run) -> dict[str, float]:
    """Milliseconds of a pass by name of its slowest kernels, and "the rest"."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiled.key_averages():
        if str(event.device_type).endswith("CUDA"):
            key = event.key[:160]
            found[key] = found.get(key, 0.0) + event.self_device_time_total / 1000
    slowest = dict(sorted(found.items(), key=lambda item: -item[1])[:KERNELS])
    return slowest | {"the rest": sum(found.values()) - sum(slowest.values())}


if __name__ == "__main__":
    main()
