"""Seconds a group over HTTP, and what the service adds: `python benchmarks/explore_speed.py`.

A real service is started on loopback. For each precision the same group of candidates is asked for over HTTP and
made in this process in turn, so that both meet the same machine; medians are compared.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console
from rich.table import Table
from solrl_core.families import load_backbone
from solrl_core.generator import CHUNK, Generator
from solrl_core.rewards import RewardSet
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import Candidates, Plan, Precision, PromptItem, RewardSpec, RolloutRequest
from solrl_trainer.client import RolloutClient
from solrl_trainer.demo import rollout_service

STEPS = 6


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mini-sana")
    parser.add_argument("--reward", default="clipscore")
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path("docs/results/explore_speed.json"))
    args = parser.parse_args()

    backbone = load_backbone(args.model)
    rewards = RewardSet.load([args.reward], backbone)
    prompt = PromptItem(id="speed", text="a red circle and a blue square")
    table = Table("precision", "HTTP, s a group", "in process, s", "service adds")
    results = {}
    with rollout_service(args.model, Path("runs/benchmarks/service.log")) as url, RolloutClient(url) as client:
        precisions: tuple[Precision, ...] = ("nvfp4", "bf16")
        for precision in precisions:
            generator = Generator(backbone, precision)

            def over_http(root: int, precision: Precision = precision) -> None:
                client.rollouts(
                    RolloutRequest(
                        model=args.model,
                        prompts=(prompt,),
                        candidates=Candidates(count=args.candidates, seed_root=root),
                        plan=Plan(steps=STEPS, precision=precision),
                        rewards=(RewardSpec(name=args.reward),),
                    )
                )

            def in_process(root: int, generator: Generator = generator) -> None:
                seeds = expand_seeds(root, prompt.id, args.candidates)
                for start in range(0, len(seeds), CHUNK):
                    images = generator.generate(prompt.text, seeds[start : start + CHUNK], steps=STEPS).images
                    rewards.score([args.reward], images, [prompt.text] * len(images), [{}] * len(images))

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
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"candidates": args.candidates, "steps": STEPS, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
