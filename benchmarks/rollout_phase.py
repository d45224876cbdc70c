"""Rollout phase, adapter update and cold start of FLUX.1 on a GPU: `python benchmarks/rollout_phase.py`.

All parts have true size and random weights, on which time does not depend: transformer, T5-XXL and CLIP, VAE, and
HPSv2 with its CLIP ViT-H/14. Candidates are generated as in the service: 24 at a time, scored while the next 24 are
generated. Each part is written as soon as it is measured; parts that do not run keep their last result.
Writes docs/results/rollout_phase.{json,md,png}.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout_phase_report import render

PARTS = ("cold", "adapter", "share", "regenerate", "phase")
CANDIDATES, KEPT = 96, 24
EXPLORE, REGENERATE = 6, 10
PRUNED = ((6, 2, 48), (6, 3, 48), (6, 2, 32), (6, 4, 48), (4, 3, 48), (4, 3, 40), (4, 3, 32))
"""(steps, steps before pruning, candidates kept); plans with fewer than `EXPLORE` steps use fitted steps."""
RANK = 32


def main() -> None:
    """Measure the selected parts, write and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds of exploring and regenerating; the baseline runs once"
    )
    parser.add_argument("--reward-dtype", default="float32", help="dtype of the reward's weights and products")
    parser.add_argument("--device", default="cuda", help="cpu: try it out on a miniature")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--render", action="store_true", help="render table and plot from the JSON, without measuring")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "rollout_phase.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def note(part: str, values: dict[str, Any]) -> None:
        if part == "setting" and result.get(part) != values:
            # Drop results measured with another setting.
            for old in ("adapter", "share", "reward", "regenerate", "phase"):
                result.pop(old, None)
        result[part] = values
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"[{time.perf_counter() - began:.0f} s] {part}: {values}", file=sys.stderr, flush=True)

    began = time.perf_counter()
    if not args.render:
        with tempfile.TemporaryDirectory() as caches:
            # Empty at first; the second start and the other parts reuse the caches of the first.
            os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
            if "cold" in args.parts:
                for name in ("cold", "second start"):
                    note(name, cold_start(args.device, name == "cold"))
            if set(args.parts) - {"cold"}:
                in_process(args, note)
    print(render(result, args.out))


def cold_start(device: str, first: bool) -> dict[str, Any]:
    """Run a service's start in its own process; seconds of each part, and "failed" with the reason if it failed."""
    command = [sys.executable, str(Path(__file__).with_name("cold_start.py")), device, repr(time.time())]
    try:
        # The work after the first candidate is the same in both starts, so only the first measures it.
        done = subprocess.run([*command, *["all"] * first], stdout=subprocess.PIPE, text=True, timeout=150)
        lines, failed = done.stdout, f"ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        lines, failed = said.decode() if isinstance(said, bytes) else said, "took more than 150 s"
    seconds: dict[str, Any] = dict(json.loads(line) for line in lines.splitlines() if line.startswith('["'))
    return seconds | ({"failed": failed} if failed else {})


def in_process(args: argparse.Namespace, note: Callable[[str, dict[str, Any]], None]) -> None:
    """Measure the parts that share a loaded model."""
    import torch
    from rollout_path import ServedWay, reward_precisions, shares
    from solrl_core.families.skeleton import materialize
    from solrl_core.generator import CHUNK_SIZE, Generator
    from solrl_core.rewards import RewardSet
    from true_size import random_hps, skeleton

    with tempfile.TemporaryDirectory() as folder:
        backbone = materialize(skeleton("flux", Path(folder), args.device), args.device)
    rewards = RewardSet({"hpsv2": random_hps(args.device, args.reward_dtype)})
    on_gpu = args.device != "cpu"
    device = torch.cuda.get_device_name() if on_gpu else "CPU, the miniature"
    cheap = ServedWay(Generator(backbone, "fp8" if on_gpu else "nvfp4"), rewards)
    note(
        "setting",
        {"device": device, "reward": args.reward_dtype, "size": backbone.width, "precision": cheap.generator.precision},
    )
    # Compile both batch sizes.
    cheap.score("warm-up", range(CHUNK_SIZE + 1), 1)
    if "adapter" in args.parts:
        note("adapter", adapter(cheap))
    if "share" in args.parts:
        note("share", shares(cheap, CANDIDATES, EXPLORE))
        if args.reward_dtype == "float32":
            note("reward", reward_precisions(cheap, CHUNK_SIZE))
    if {"phase", "regenerate"} & set(args.parts):
        true = ServedWay(Generator(backbone, "bf16"), rewards)
        true.score("warm-up", range(CHUNK_SIZE), 1)
    if "regenerate" in args.parts:
        note("regenerate", shares(true, KEPT, REGENERATE))
    if "phase" in args.parts:
        note("phase", {})
        phase(cheap, true, args.rounds, lambda values: note("phase", values))


def phase(cheap: Any, true: Any, rounds: int, note: Callable[[dict[str, Any]], None]) -> None:
    """Time exploring with and without pruning, regenerating, and the baseline, interleaved."""
    times: dict[str, list[float]] = {}

    def take(name: str, work: Callable[[str, Sequence[int]], Any], seeds: Sequence[int]) -> None:
        began = time.perf_counter()
        # A new text each time, so that the prompt is not cached.
        work(f"a red circle and {name}, {len(times.get(name, ()))}", seeds)
        times.setdefault(name, []).append(time.perf_counter() - began)
        note({key: {"s": statistics.median(each), "times": each} for key, each in times.items()})

    for turn in range(rounds):
        take("explore", lambda text, seeds: cheap.score(text, seeds, EXPLORE), range(CANDIDATES))
        take("regenerate", lambda text, seeds: true.score(text, seeds, REGENERATE), range(KEPT))
        for steps, after, keep in PRUNED:
            plan = pruned_plan(steps, after, keep)
            take(
                f"explore, {'' if steps == EXPLORE else f'{steps} fitted steps, '}after {after} keep {keep}",
                lambda text, seeds, plan=plan: cheap.pruned(text, seeds, plan),  # type: ignore[misc]
                range(CANDIDATES),
            )
        if turn == 0:
            take("baseline", lambda text, seeds: true.score(text, seeds, REGENERATE), range(CANDIDATES))


def pruned_plan(steps: int, after: int, keep: int) -> Any:
    """Plan with Euler steps, or with fewer fitted steps, whose coefficients do not affect the time."""
    from solrl_core.fitting import SCHEDULES, identity_solver
    from solrl_proto.rollouts import Plan, Prune

    fitted = None if steps == EXPLORE else identity_solver(SCHEDULES[-1])
    return Plan(steps=steps, fitted=fitted, prune=Prune(after=after, keep=keep))


def adapter(cheap: Any) -> dict[str, Any]:
    """Time of an adapter update from bytes in memory to served, by part, medians of 3; and recompiled graphs."""
    import torch
    from solrl_core.adapter import Adapter, decode_adapter, encode_adapter, lora_a_key, lora_b_key
    from solrl_proto.adapters import adapter_digest
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
    cheap.score("warm-up", range(24 + 1), 1)
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
