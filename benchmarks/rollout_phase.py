"""Rollout phases at true size on a GPU: `python benchmarks/rollout_phase.py`.

All parts have true size and random weights, on which time does not depend: transformer, text encoders, autoencoder, and
HPSv2 with its CLIP ViT-H/14. Candidates are generated as in the service: 24 at a time, scored while the next 24 are
generated. The baseline generates every candidate as it is trained, in BF16 with diffusers' own modules, compiled.
Each model runs in its own process. Each part is written as soon as it is measured; parts that do not run keep their
last result, but a phase replaces all plans of an earlier one. Writes docs/results/rollout_phase.{json,md,png}.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rollout_phase_report import BASELINE, FP8, NAMES, REGENERATE, UNPRUNED, render
from support.own_process import ProcessEndedError, Row, rows_of

PARTS = ("adapter", "phase", "fp8-decoder", "pruned", "share")
CANDIDATES, KEPT = 96, 24
EXPLORE_STEPS, REGENERATE_STEPS, FITTED_STEPS = 6, 10, 4
KEEP = 64
"""Candidates that the pruned plan keeps after four of the six steps."""
RANK = 32


def main() -> None:
    """Measure the selected parts, write and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument(
        "--parts",
        nargs="+",
        default=PARTS,
        choices=PARTS,
        help="adapter: flux alone; fp8-decoder and pruned: further plans of a phase",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds of exploring and regenerating; the baseline runs once"
    )
    parser.add_argument("--reward-dtype", default="bfloat16", help="dtype of the reward's weights and products")
    parser.add_argument("--device", default="cuda", help="cpu: try it out on the miniatures")
    parser.add_argument("--limit", type=float, default=500, help="time limit per model in seconds")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--render", action="store_true", help="render tables and plot from the JSON, without measuring")
    parser.add_argument("--note", help="with --render: a sentence that the page adds for these models")
    args = parser.parse_args()
    if set(args.parts) & {"fp8-decoder", "pruned", "share"} and "phase" not in args.parts:
        parser.error("fp8-decoder, pruned and share need the part phase")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "rollout_phase.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"models": {}}

    def note(of: dict[str, Any], part: str, values: dict[str, Any]) -> None:
        of[part] = values
        file.write_text(json.dumps(result, indent=1) + "\n")

    if args.render and args.note:
        for model in args.models:
            note(result["models"][model], "note", args.note)
    with empty_caches():
        for model in () if args.render else args.models:
            own = result["models"].setdefault(model, {})
            try:
                for row in rows_of(measure, model, args, device=args.device, limit=args.limit):
                    print(row, file=sys.stderr, flush=True)
                    own.pop("failed", None)
                    if row["part"] == "setting" and own.get("setting") != row["values"]:
                        own.clear()  # the rest was measured with another setting
                    note(result if row["part"] == "adapter" else own, row["part"], row["values"])
            except ProcessEndedError as error:
                note(own, "failed", str(error))
    print(render(result, args.out))


@contextmanager
def empty_caches() -> Iterator[None]:
    """Within it, compiled code has caches that are empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        with patch.dict(os.environ, own):
            yield


def measure(model: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield each part of a model, some of them again with more values."""
    import torch
    from rollout_path import Explorer, shares
    from solrl_core.families.skeleton import materialize
    from solrl_core.generator import CHUNK_SIZE, Generator
    from solrl_core.rewards import RewardSet
    from solrl_proto.rollouts import Plan
    from true_size import random_hps, skeleton

    def row(part: str, values: dict[str, Any]) -> Row:
        return {"model": model, "part": part, "values": values}

    on_gpu = args.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        backbone = materialize(skeleton(model, Path(folder), args.device), args.device)
    rewards = RewardSet({"hpsv2": random_hps(args.device, args.reward_dtype)})
    cheap = Explorer(Generator(backbone, "fp8" if on_gpu else "nvfp4"), rewards)
    device = torch.cuda.get_device_name() if on_gpu else "CPU, the miniature"
    setting = {"device": device, "reward": args.reward_dtype, "size": backbone.width}
    yield row("setting", setting | {"precision": cheap.generator.precision, "baseline": "diffusers' modules"})
    cheap.explore("warm-up", range(CHUNK_SIZE + 1), Plan(steps=1))  # compiles both batch sizes
    if "fp8-decoder" in args.parts:
        cheap.explore("warm-up", range(CHUNK_SIZE), Plan(steps=1, decoder_precision="fp8"))
    if "adapter" in args.parts and model == "flux":
        yield row("adapter", adapter(cheap))
    if "phase" not in args.parts:
        return
    plans, full = explored(args.parts), Plan(steps=REGENERATE_STEPS)
    true = Explorer(Generator(backbone, "bf16"), rewards)
    true.explore("warm-up", range(CHUNK_SIZE), Plan(steps=1))
    with diffusers_modules(backbone):
        baseline = Explorer(Generator(backbone, "bf16"), rewards)
        baseline.explore("warm-up", range(CHUNK_SIZE), Plan(steps=1))

    def generate_all(text: str) -> None:
        with diffusers_modules(backbone):
            baseline.explore(text, range(CANDIDATES), full)

    works: dict[str, Callable[[str], Any]] = {REGENERATE: lambda text: true.explore(text, range(KEPT), full)}
    works |= {
        name: lambda text, plan=plan: cheap.explore(text, range(CANDIDATES), plan)  # type: ignore[misc]
        for name, plan in plans.items()
    }
    for times in phase(works, {BASELINE: generate_all}, args.rounds):
        values = {name: {"s": statistics.median(each), "times": each} for name, each in times.items()}
        yield row("phase", values)
    if "share" in args.parts:
        found: dict[str, Any] = {}
        for name in (UNPRUNED, UNPRUNED + FP8):
            if name in plans:
                yield row("share", found := found | {name: shares(cheap, CANDIDATES, plans[name], times[name])})
        yield row("regenerate", shares(true, KEPT, full, times[REGENERATE]))


@contextmanager
def diffusers_modules(backbone: Any) -> Iterator[None]:
    """Within it, generators are made of diffusers' own modules, compiled, and the decoder has its own, too."""
    with (
        patch.object(backbone, "fuse", lambda transformer: None),
        patch.object(backbone, "_vae", backbone.parts["vae"]),
        patch("solrl_core.families.pipeline.fused_decoder", lambda vae: vae),
    ):
        yield


def explored(parts: Sequence[str]) -> dict[str, Any]:
    """Exploration plans by name: six steps and four fitted ones; with these parts decoded in FP8, and pruned.

    The coefficients of fitted steps do not affect the time.
    """
    from solrl_core.fitting import SCHEDULES, identity_solver
    from solrl_proto.rollouts import Plan, Prune

    fitted = Plan(steps=FITTED_STEPS, fitted=identity_solver(SCHEDULES[-1]))
    plans = {UNPRUNED: Plan(steps=EXPLORE_STEPS), f"{FITTED_STEPS} fitted steps": fitted}
    whole = dict(plans)
    if "fp8-decoder" in parts:
        plans |= {name + FP8: plan.model_copy(update={"decoder_precision": "fp8"}) for name, plan in whole.items()}
    if "pruned" in parts:
        prune = Prune(after=EXPLORE_STEPS - 2, keep=KEEP)
        plans[f"{UNPRUNED}, pruned to {KEEP} after {prune.after}"] = Plan(steps=EXPLORE_STEPS, prune=prune)
    return plans


def phase(
    works: dict[str, Callable[[str], Any]], once: dict[str, Callable[[str], Any]], rounds: int
) -> Iterator[dict[str, list[float]]]:
    """Seconds of works by name, timed in turns, some of them once; all so far after each work."""
    times: dict[str, list[float]] = {}
    for turn in range(rounds):
        # Those of one round first: without the baseline, a phase that was cut off says nothing.
        for name, work in (works if turn else once | works).items():
            began = time.perf_counter()
            work(f"a red circle and {name}, {turn}")  # a new text each time, so that the prompt is not cached
            times.setdefault(name, []).append(time.perf_counter() - began)
            yield times


def adapter(cheap: Any) -> dict[str, Any]:
    """Time of an adapter update from bytes in memory to served, by part, medians of 3; and recompiled graphs."""
    import torch
    from solrl_core.adapter import Adapter, decode_adapter, encode_adapter, lora_a_key, lora_b_key
    from solrl_proto.adapters import adapter_digest
    from solrl_proto.rollouts import Plan
    from torch._dynamo.utils import counters

    generator = cheap.generator
    device = generator.backbone.device
    noise = torch.Generator().manual_seed(0)
    tensors = {}
    for module, (outs, ins) in generator.layout.items():
        tensors[lora_a_key(module)] = torch.randn(RANK, ins, generator=noise) * 0.01
        tensors[lora_b_key(module)] = torch.randn(outs, RANK, generator=noise) * 0.01
    body = encode_adapter(Adapter(RANK, float(RANK), tensors))
    times: dict[str, list[float]] = {name: [] for name in ("digest", "decode", "upload", "merge")}
    for _ in range(3):
        given: Any = None
        steps: dict[str, Callable[[Any], Any]] = {
            "digest": lambda _: adapter_digest(body),
            "decode": lambda _: decode_adapter(body, generator.layout),
            "upload": lambda decoded: decoded.to(device),
            "merge": generator.set_adapter,
        }
        for name, work in steps.items():
            began = time.perf_counter()
            given = work(given)
            cheap.settle()
            times[name].append(time.perf_counter() - began)
    before = counters["stats"]["unique_graphs"]
    began = time.perf_counter()
    cheap.explore("warm-up", range(24 + 1), Plan(steps=1))
    after = time.perf_counter() - began
    generator.set_adapter(None)
    parts = {name: statistics.median(each) for name, each in times.items()}
    whole = statistics.median(map(sum, zip(*times.values(), strict=True)))
    recompiled = counters["stats"]["unique_graphs"] - before
    bound = len(generator.layout)
    said = {"bytes": len(body), "modules": bound, "recompiled": recompiled, "first_chunk_of_one_step": after}
    return {"whole": whole, "parts": parts, **said}


if __name__ == "__main__":
    main()
