"""Cost of exploring with an older policy (lag): `python benchmarks/lag.py [--jobs 2]`.

At a lag of L, iteration i explores under version i − L. Measures learning by running the preset at each lag and seed.
Measures selection on the run without lag: the candidates of some iterations are explored again under older versions,
and ranked against the BF16 rewards under the version being trained. Writes docs/results/lag.{json,md}.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from caveats import PREPARED_FOR_NVFP4, STRICT_ACCURACY
from solrl_core.adapter import decode_adapter
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_proto.noise import expand_seeds
from solrl_trainer.demo import rollout_service
from solrl_trainer.evaluation import JUDGE, STRICT
from solrl_trainer.prompts import find_prompts, prompts_of_iteration, read_prompts

PRESET = "mini-sana/sol_rl/clipscore"
LAGS = (0, 1, 2, 4)
_PROMPTS = 8
_CANDIDATES = 96
_READY_SECONDS = 600.0
"""On a GPU every service compiles at its start, and several share the CPU cores."""


def main() -> None:
    """Run the missing trainings, compare all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1])
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; they share the CPU cores")
    parser.add_argument("--runs", type=Path, default=Path("runs/lag"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // args.jobs))
    runs = [(lag, seed) for seed in args.seeds for lag in LAGS]

    def run(pair: tuple[int, int]) -> None:
        folder = args.runs / f"lag-{pair[0]}-seed-{pair[1]}"
        if not (folder / "result.json").is_file():
            train(*pair, folder, args.iterations)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, runs))
    chosen = selection(args.runs / f"lag-0-seed-{args.seeds[0]}", args.iterations, args.seeds[0])
    learned = {
        lag: [json.loads((args.runs / f"lag-{lag}-seed-{seed}/result.json").read_text()) for seed in args.seeds]
        for lag in LAGS
    }
    write(learned, chosen, args)


def train(lag: int, seed: int, folder: Path, iterations: int) -> None:
    """Train one run, keeping the adapters of all versions."""
    folder.mkdir(parents=True, exist_ok=True)
    with rollout_service("mini-sana", folder / "service.log", ready_seconds=_READY_SECONDS) as url:
        command = [sys.executable, "-m", "solrl_trainer", "run", "--preset", PRESET, "--rollout-url", url]
        command += ["--resume", str(folder), "--iterations", str(iterations)]
        settings = (f"seed={seed}", f"explore.lag={lag}", "explore.precision=nvfp4", f"keep_checkpoints={iterations}")
        command += [part for setting in settings for part in ("--set", setting)]
        with (folder / "train.log").open("a") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    print(f"done: lag {lag}, seed {seed}", file=sys.stderr, flush=True)


def selection(folder: Path, iterations: int, seed: int) -> dict[int, dict[str, Any]]:
    """Rank fidelity of exploration at each lag, and the share of its selected seeds also selected without lag."""
    backbone = load_backbone("mini-sana", device="cuda" if torch.cuda.is_available() else "cpu")
    rewards = RewardSet.load(["clipscore"], backbone)
    cheap, true = Generator(backbone, "nvfp4"), Generator(backbone, "bf16")
    train_set = read_prompts(find_prompts("shapes"), "train")
    proxies: dict[int, list[torch.Tensor]] = {lag: [] for lag in LAGS}
    trues: list[torch.Tensor] = []

    def adapter(version: int) -> bytes:
        return (folder / f"checkpoints/{version:06d}/adapter.safetensors").read_bytes()

    def scores(generator: Generator, version: int, iteration: int, steps: int) -> torch.Tensor:
        generator.set_adapter(decode_adapter(adapter(version), generator.layout))
        rows = []
        for prompt in prompts_of_iteration(train_set, _PROMPTS, seed, iteration):
            seeds = expand_seeds(iteration, prompt.id, _CANDIDATES)
            images = generator.generate(prompt.text, seeds, steps=steps).images
            texts, metadata = [prompt.text] * len(seeds), [prompt.metadata] * len(seeds)
            rows.append(rewards.score(["clipscore"], images, texts, metadata)["clipscore"])
        return torch.stack(rows)

    for iteration in range(max(LAGS) + 1, iterations, max(1, iterations // 3)):
        trues.append(scores(true, iteration, iteration, 10))
        for lag in LAGS:
            proxies[lag].append(scores(cheap, iteration - lag, iteration, 6))
    current = _kept(torch.cat(proxies[0]))
    found = {}
    for lag in LAGS:
        proxy = torch.cat(proxies[lag])
        match = sum(len(a & b) for a, b in zip(_kept(proxy), current, strict=True)) / sum(map(len, current))
        found[lag] = {"match": match, **asdict(rank_fidelity(proxy, torch.cat(trues)))}
    return found


def _device_name() -> str:
    return f"one {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "a CPU"


def _kept(scores: torch.Tensor) -> list[set[tuple[int, bool]]]:
    """Best 12 and worst 12 candidates of each group, as (index, is best) pairs."""
    order = scores.argsort(1, descending=True)
    return [{(int(i), True) for i in row[:12]} | {(int(i), False) for i in row[-12:]} for row in order]


def write(
    learned: dict[int, list[dict[str, Any]]], chosen: dict[int, dict[str, Any]], args: argparse.Namespace
) -> None:
    """Write the table, as JSON and Markdown."""
    lines = [
        "# Cost of exploring with an older policy",
        "",
        f"By `python benchmarks/lag.py --iterations {args.iterations}` on {_device_name()}: `{PRESET}`,",
        f"seeds {args.seeds}; gains of the averaged weights on held-out prompts. Same selection: share of the 12 best",
        "and 12 worst that are also selected without lag, on the run without lag. True ranks are defined as in",
        "rank_fidelity.md, under the version being trained.",
        "",
        *STRICT_ACCURACY,
        "",
        *PREPARED_FOR_NVFP4,
        "",
        "| lag | strict accuracy, points | by the judge | clipscore | same selection | Spearman | true ranks |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = []
    for lag, results in learned.items():
        strict, judged = ([100 * result["rewards"][by]["gain"] for result in results] for by in (STRICT, JUDGE))
        clip = [result["rewards"]["clipscore"]["gain"] for result in results]
        found = chosen[lag]
        rows.append({"lag": lag, "strict": strict, "judge": judged, "clipscore": clip, **found})
        gains = " | ".join(
            f"{' / '.join(f'{gain:+.1f}' for gain in each)} (mean {statistics.mean(each):+.1f})"
            for each in (strict, judged)
        )
        lines.append(
            f"| {lag} | {gains} | {statistics.mean(clip):+.4f} "
            f"| {found['match']:.1%} | {found['spearman']:.3f} | {found['top_rank']:.1f} / {found['bottom_rank']:.1f} |"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "lag.json").write_text(json.dumps(rows, indent=1) + "\n")
    (args.out / "lag.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
