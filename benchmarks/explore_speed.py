"""Seconds per group over HTTP, and the overhead of the service: `python benchmarks/explore_speed.py`.

Starts a real service on loopback. For each precision the same group of candidates is requested over HTTP and generated
in this process, alternately so that both see the same load on the machine. Compares medians. With
`--true-size FOLDER` the model is FLUX.1 with random weights, written to that folder, with a reward of HPSv2's size, on
a GPU. Writes docs/results/explore_speed.json, or true_speed.json.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from rich.console import Console
from rich.table import Table
from rollout_path import ServedWay
from solrl_client.rollouts import RolloutClient
from solrl_core.families import load_backbone
from solrl_core.generator import Generator
from solrl_core.precision import PRECISIONS
from solrl_core.rewards import RewardSet
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import Candidates, Plan, Precision, PromptItem, RewardSpec, RolloutRequest
from solrl_trainer.demo import rollout_service
from true_size import written

STEPS = 6


def main() -> None:
    """Measure, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mini-sana")
    parser.add_argument("--reward", default="clipscore")
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="default: nvfp4 and bf16; at true size fp8")
    parser.add_argument("--true-size", type=Path, help="use FLUX.1 with random weights, written to this folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    args.precisions = args.precisions or (["fp8"] if args.true_size else ["nvfp4", "bf16"])
    flags, options = ["--device", args.device, "--precision", args.precisions[0]], {}
    if args.true_size:
        model, options = written(args.true_size, args.device)
        args.model, args.reward = str(model), "hpsv2"
        flags += ["--reward-options", json.dumps(options)]

    backbone = load_backbone(args.model, device=args.device)
    rewards = RewardSet.load([args.reward], backbone, options)
    prompt = PromptItem(id="speed", text="a red circle and a blue square")
    table = Table("precision", "HTTP, s per group", "in process, s per group", "overhead")
    results = {}
    log = Path("runs/benchmarks/service.log")
    with rollout_service(args.model, log, (args.reward,), flags, 600) as url, RolloutClient(url) as client:
        for precision in args.precisions:
            way = ServedWay(Generator(backbone, precision), rewards)

            def over_http(root: int, precision: Precision = precision) -> None:
                client.rollouts(
                    RolloutRequest(
                        model=backbone.name,
                        prompts=(prompt,),
                        candidates=Candidates(count=args.candidates, seed_root=root),
                        plan=Plan(steps=STEPS, precision=precision),
                        rewards=(RewardSpec(name=args.reward),),
                    )
                )

            def in_process(root: int, way: ServedWay = way) -> None:
                # Like the engine, which overlaps scoring with generation only on a GPU.
                seeds = expand_seeds(root, prompt.id, args.candidates)
                way.explore(prompt.text, seeds, Plan(steps=STEPS), overlap=args.device != "cpu")

            times: dict[str, list[float]] = {"http": [], "in_process": []}
            for repeat in range(-2, args.repeats):
                both = (("http", over_http), ("in_process", in_process))
                for name, work in both if repeat % 2 else both[::-1]:
                    start = time.perf_counter()
                    work(repeat + 2)
                    if repeat >= 0:
                        times[name].append(time.perf_counter() - start)
            http, local = (statistics.median(values) for values in times.values())
            adds = statistics.median(a / b for a, b in zip(times["http"], times["in_process"], strict=True)) - 1
            results[precision] = {"http": http, "in_process": local, "service_adds": adds, "times": times}
            table.add_row(precision, f"{http:.2f}", f"{local:.2f}", f"{adds:+.1%}")
    Console().print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    device = "CPU" if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    setting = {
        "device": device,
        "model": backbone.name,
        "size": backbone.width,
        "candidates": args.candidates,
        "steps": STEPS,
    }
    file = args.out / ("true_speed.json" if args.true_size else "explore_speed.json")
    file.write_text(json.dumps({**setting, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
