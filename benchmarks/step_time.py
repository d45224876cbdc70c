"""Time of a forward pass by precision, at the real models' shapes: `python benchmarks/step_time.py`, on a GPU.

Each model runs in its own process, which builds the transformer with random weights at each precision, compiles it, and
then measures all precisions interleaved, so that all run at the same clocks. Writes
benchmarks/results/step_time.{json,md}.
"""

import argparse
import copy
import gc
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from solrl_core.families import Backbone
from solrl_core.families.skeleton import Meta
from solrl_core.precision.layer_policy import apply_policy
from solrl_core.sampling.device_events import DeviceEvent
from support.random_weights import randomize
from support.results import Row, device_name, in_turns, measure_models, shown_size, table, timed
from support.true_size import random_text, size_of, skeleton

Run = Callable[[], Any]

BASELINE = "diffusers bf16 compiled"
TIERS = (BASELINE, "bf16", "fp8")
ALL_TIERS = (*TIERS, "nvfp4 emulated")
BATCH = {
    **{"flux": 24, "sd3": 8, "sana": 24, "sd3-medium": 24, "z-image": 24, "qwen-image": 24, "flux2-klein": 24},
    **{"wan": 4, "wan-81": 2, "wan-14b": 2},
}
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
    measure_models(
        "step_time",
        __doc__,
        list(BATCH),
        measure,
        page,
        further=lambda parser: parser.add_argument("--tiers", nargs="+", default=TIERS, choices=ALL_TIERS),
    )


def measure(model: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each precision, after all are compiled."""
    device, batch = args.device, BATCH[model]
    ready: list[tuple[Row, Run]] = []
    with tempfile.TemporaryDirectory() as folder:
        backbone = skeleton(model, Path(folder), device)
        with Meta():
            text = backbone.encode(["a"])
        backbone.device = torch.device(device)
        for tier in args.tiers:
            transformer = build(backbone, tier, device)
            stack = partial(Backbone.stack, backbone) if tier == BASELINE else backbone.stack
            run = step(backbone, transformer, text, batch, model, stack)
            compiling, out = timed(run)
            row = {"model": model, "tier": tier, "device": device_name(device), "size": size_of(backbone)}
            row |= {"batch": batch, "compile_s": compiling, "finite": bool(out.isfinite().all())}
            ready.append((row, run))
            gc.collect()
        works = {row["tier"]: lambda _, run=run: seconds(run, backbone.device) for row, run in ready}
        times = in_turns(works, ROUNDS)
        for row, run in ready:
            each = times[row["tier"]]
            row["ms"], row["times_ms"] = 1000 * statistics.median(each), [round(1000 * one, 2) for one in each]
            row["kernels"] = kernels(run) if device != "cpu" else {}
            yield row


def build(backbone: Any, tier: str, device: str) -> Any:
    """Build a transformer at a precision; it compiles on its first call."""
    transformer = randomize(copy.deepcopy(backbone.transformer), device)
    if tier not in (BASELINE, "bf16"):
        apply_policy(transformer, backbone.policy_at("fp8" if "fp8" in tier else "nvfp4"), tier)
    if device != "cpu":
        # The baseline compiles diffusers' blocks without fusion.
        (backbone.compile_blocks if tier == BASELINE else backbone.compile)(transformer)
    return transformer


def step(
    backbone: Any, transformer: Any, text: dict[str, Any], batch: int, model: str, stack: Callable[..., dict[str, Any]]
) -> Run:
    """One forward pass over `batch` candidates of one prompt, with random latents and text, joined by `stack`."""
    conditioning = stack([random_text(text, model, backbone.device)] * batch)
    latents = torch.randn(batch, *backbone.latent_shape, device=backbone.device)
    sigma = torch.full((batch,), 0.7, device=backbone.device)
    run = partial(backbone.velocity, transformer, latents, sigma, conditioning)
    return torch.inference_mode()(run)


def seconds(run: Run, device: torch.device) -> float:
    """Seconds of a call, by the device's clock."""
    before = DeviceEvent(device)
    run()
    after = DeviceEvent(device)
    after.wait()
    return after.since(before)


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
    order = list(BATCH), list(ALL_TIERS)
    rows = sorted(found["rows"], key=lambda row: (order[0].index(row["model"]), order[1].index(row["tier"])))
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows))
    base = {row["model"]: row["ms"] for row in rows if row["tier"] == BASELINE}
    kinds = [name for name, _ in CATEGORIES]
    lines = [
        "# Forward pass by precision",
        "",
        f"By `python benchmarks/step_time.py` on one {devices}: transformers at true size with random weights; time",
        "does not depend on the weights. Medians of 5 by CUDA events; the precisions of a model are interleaved in one",
        f"process. Speed-ups are relative to {BASELINE}: diffusers' own blocks, each compiled, without fusion.",
        "Compile: time of the first pass; empty where another process had compiled.",
        "",
        *table(("model", "precision", "ms", "speed-up", "compile, s"), (_cells(row, base) for row in rows)),
        "",
        "Milliseconds of a pass by kind of kernel, classified by the kernels' names:",
        "",
        *table(
            ("model", "precision", *kinds),
            ((_shape(row), row["tier"], *(f"{ms:.1f}" for ms in spent(row).values())) for row in rows),
        ),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row, base: Mapping[str, float]) -> Iterator[str]:
    """Cells of a row; `base` has the baseline's milliseconds by model."""
    yield f"{_shape(row)}, batch {row['batch']}"
    yield row["tier"] + ("" if row["finite"] else " (not finite)")
    yield f"{row['ms']:.1f}"
    yield f"{base[row['model']] / row['ms']:.2f}" if row["model"] in base else ""
    yield f"{row['compile_s']:.1f}" if "compile_s" in row else ""


def _shape(row: Row) -> str:
    return f"{NAMES[row['model']]} {shown_size(row['size'])}"


if __name__ == "__main__":
    main()
