"""Time of a forward pass by precision, at the real models' shapes: `python benchmarks/step_time.py`, on a GPU.

Each model runs in its own process, which builds the transformer with random weights at each precision, compiles it for
both batch sizes, and then measures all precisions interleaved, so that all run at the same clocks. Rows are written as
they are measured. Writes benchmarks/results/step_time.{json,md}.
"""

import argparse
import copy
import gc
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from solrl_core.families.backbone import Backbone
from solrl_core.families.skeleton import Meta
from solrl_core.precision import apply_policy
from solrl_core.sampling.batches import gpu_batch_sizes
from solrl_core.sampling.device_events import record_event
from support.own_process import ProcessEndedError, rows_of
from support.random_weights import randomize
from support.results import Results, Row, device_name, options, shown_size, table
from support.true_size import size_of, skeleton

Run = Callable[[], Any]

BASELINE = "diffusers bf16 compiled"
TIERS = (BASELINE, "bf16", "fp8")
ALL_TIERS = (*TIERS, "nvfp4 emulated")
SERVED = ("bf16", "fp8")
"""Precisions measured at a quarter of the batch, too."""
BATCH = {
    **{"flux": 24, "sd3": 8, "sana": 24, "sd3-medium": 24, "z-image": 24, "qwen-image": 24, "flux2-klein": 24},
    **{"wan": 4, "wan-81": 2, "wan-14b": 2},
}
TOKENS = {
    **{"flux": 128, "sd3": 205, "sana": 300, "sd3-medium": 205, "z-image": 64},
    **{"qwen-image": 256, "flux2-klein": 512, "wan": 512, "wan-81": 512, "wan-14b": 512},
}
"""Text tokens of the real models; the miniatures' tokenizers give fewer."""
ORDER = {name: at for at, name in enumerate((BASELINE, "bf16", "fp8"))}
GOALS: dict[str, tuple[int | None, float, float | None]] = {
    "flux": (675, 1.6, 1.8),
    "sd3": (478, 1.4, 1.6),
    "sana": (155, 1.25, 1.4),
    "sd3-medium": (None, 1.3, None),
    "z-image": (None, 1.3, None),
    "qwen-image": (None, 1.3, None),
    "flux2-klein": (None, 1.3, None),
    "wan": (None, 1.3, None),
    "wan-81": (None, 1.3, None),
    "wan-14b": (None, 1.3, None),
}
"""Model → (reference time of the baseline in ms, required speed-up of FP8, goal for the speed-up of FP8)."""
NAMES = {
    **{"flux": "FLUX.1", "sd3": "SD3.5-L", "sana": "SANA 1.6B", "sd3-medium": "SD3.5-M", "z-image": "Z-Image"},
    **{"qwen-image": "Qwen-Image", "flux2-klein": "FLUX.2 [klein] 4B"},
    **{"wan": "Wan2.1 1.3B", "wan-81": "Wan2.1 1.3B", "wan-14b": "Wan2.1 14B"},
}
CATEGORIES = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("quantising", r"^_(packed_)?rows|_codes$|quantiz|cast_transpose|cast_fp8|cast_only|amax"),
    ("norms and positions", r"rms_norm|layer_norm|layernorm|rsqrt|rope|group_norm"),
    ("convolution", r"^triton_poi_fused_convolution|depthwise|conv2d|convolve|fprop|implicit|cudnn|nchw|nhwc"),
    ("matrix products", r"nvjet|gemm|xmma|cutlass|cublas|splitk|^triton_tem"),
    ("other", r""),
)
"""(category, pattern). A kernel belongs to the first category whose pattern occurs in its name."""
ROUNDS = 5
KERNELS = 25
"""Number of slowest kernels to record by name."""


def main() -> None:
    """Measure each model in its own process; write and print the tables."""
    parser = options(__doc__, device="cuda")
    parser.add_argument("--models", nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--tiers", nargs="+", default=TIERS, choices=ALL_TIERS)
    parser.add_argument("--limit", type=float, default=110, help="time limit per model in seconds")
    args = parser.parse_args()
    results = Results("step_time", args.out, page)
    for model in [] if args.render else args.models:
        # All rows of a model come from one run.
        results.keep(lambda row, model=model: row["model"] != model)  # type: ignore[misc]
        for row in measured(model, args):
            results.add(row, "model", "tier")
    results.show()


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
    name = device_name(device)
    ready: list[tuple[Row, Run, Run | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        backbone = skeleton(model, Path(folder), device)
        with Meta():
            text = backbone.encode(["a"])
        backbone.device = torch.device(device)
        whole, quarter = gpu_batch_sizes(BATCH[model])
        for tier in tiers:
            row: Row = {"model": model, "tier": tier, "device": name, "size": size_of(backbone), "batch": whole}
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
    began = time.perf_counter()
    out = run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began, out


def in_turns(runs: list[Run], device: str) -> list[list[float]]:
    """Time all `runs` interleaved, in `ROUNDS` rounds, by the device's clock; returns seconds per run and round.

    One more round runs first and is discarded, because matrix libraries choose their kernels in the first calls.
    """
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


def spent(row: Row) -> dict[str, float]:
    """Milliseconds of a pass by category of kernel."""
    found = dict.fromkeys((name for name, _ in CATEGORIES), 0.0)
    for kernel, ms in row["kernels"].items():
        low = kernel.lower()
        found[next(name for name, pattern in CATEGORIES if re.search(pattern, low))] += ms
    return found


def page(found: Mapping[str, Any]) -> str:
    """Markdown tables of all rows."""
    rows = sorted(found["rows"], key=lambda row: (list(GOALS).index(row["model"]), ORDER.get(row["tier"], len(ORDER))))
    good = [row for row in rows if "ms" in row]
    devices = ", ".join(dict.fromkeys(row["device"] for row in good)) or "nothing"
    base = {row["model"]: row["ms"] for row in good if row["tier"] == BASELINE}
    head = ("model", "precision", "ms", "speed-up", "required", "goal", "quarter batch, ms", "compile, s", "launch, ms")
    kinds = [name for name, _ in CATEGORIES]
    where = ((_shape(row), row["tier"], *(f"{ms:.1f}" for ms in spent(row).values())) for row in good)
    lines = [
        "# Forward pass by precision",
        "",
        f"By `python benchmarks/step_time.py` on one {devices}: transformers at true size with random weights; time",
        "does not depend on the weights. Medians of 5 by CUDA events; the precisions of a model are interleaved in one",
        f"process. Speed-ups are relative to {BASELINE}: diffusers' own blocks, each compiled, without fusion.",
        "Compile: time of the first pass at the full batch, then at a quarter of it; empty where another process had",
        "compiled. Launch: CPU time per pass.",
        "",
        *table(head, (_cells(row, base) for row in rows)),
        "",
        "Milliseconds of a pass by kind of kernel, classified by the kernels' names:",
        "",
        *table(("model", "precision", *kinds), where),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row, base: Mapping[str, float]) -> Sequence[str]:
    """Cells of a row; `base` has the baseline's milliseconds by model."""
    tier = row["tier"]
    if "ms" not in row:
        why = row.get("failed", "ended after compiling").replace("|", "/").replace("\n", " ")
        return (NAMES[row["model"]], tier, f"not measured: {why}", *[""] * 6)
    most, reach, aim = GOALS[row["model"]]
    ratio = f"{base[row['model']] / row['ms']:.2f}" if row["model"] in base else ""
    goals = (f"{reach}", f"{aim or ''}") if tier == "fp8" else ("", "")
    if tier == BASELINE and most is not None:
        goals = (f"≤ {1.05 * most:.0f} ms", f"≤ {most} ms")
    quarter = f"{row['quarter_ms']:.1f}" if "quarter_ms" in row else ""
    compiling = " + ".join(f"{row[key]:.1f}" for key in ("compile_s", "compile_quarter_s") if key in row)
    shape = f"{_shape(row)}, batch {row['batch']}"
    finite = "" if row["finite"] else " (not finite)"
    return (shape, tier + finite, f"{row['ms']:.1f}", ratio, *goals, quarter, compiling, f"{row['launch_ms']:.1f}")


def _shape(row: Row) -> str:
    return f"{NAMES[row['model']]} {shown_size(row['size'])}"


if __name__ == "__main__":
    main()
