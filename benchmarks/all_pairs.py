"""Every miniature with every reward: `python benchmarks/all_pairs.py --jobs 2`.

Each pair runs `sol_rl` for 15 iterations against a service of its own. A pair whose result is there already is not
run again, so that the command can be stopped and continued. Writes docs/results/all_pairs.{json,md} and a grid a pair.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from solrl_trainer.demo import rollout_service
from solrl_trainer.gallery import load_gallery
from solrl_trainer.grid import write_grid

MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
NEEDED = 0.4
"""Gain wanted, in standard deviations of the base within a prompt."""
GRID_ROWS = 8


def main() -> None:
    """Run what is missing, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=1, help="pairs at a time; they share the processor's cores")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rewards", nargs="+", default=REWARDS)
    parser.add_argument("--runs", type=Path, default=Path("runs/pairs"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--set", nargs="*", default=[], help="more settings for all runs, key=value")
    args = parser.parse_args()
    pairs = [(model, reward) for model in args.models for reward in args.rewards]
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // args.jobs))

    def run(pair: tuple[str, str]) -> None:
        folder = args.runs / "-".join(pair)
        if not (folder / "result.json").is_file():
            train(*pair, folder, args.iterations, args.set)
            print(f"done: {' '.join(pair)}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, pairs))
    write(pairs, args.runs, args.out)


def train(model: str, reward: str, folder: Path, iterations: int, settings: Sequence[str]) -> None:
    """One pair: service, training, result in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with rollout_service(model, folder / "service.log", rewards=(reward,)) as url:
        command = [sys.executable, "-m", "solrl_trainer", "run"]
        command += ["--preset", f"{model}/sol_rl/{reward}", "--rollout-url", url, "--output", str(folder)]
        command += ["--iterations", str(iterations)]
        command += [part for setting in settings for part in ("--set", setting)]
        if (folder / "checkpoints").is_dir():
            command.append("--resume")
        with (folder / "train.log").open("a") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)


def write(pairs: Sequence[tuple[str, str]], runs: Path, out: Path) -> None:
    """The table of all results, as JSON and Markdown, and the grids."""
    rows = [
        row(model, reward, json.loads((runs / f"{model}-{reward}/result.json").read_text())) for model, reward in pairs
    ]
    (out / "pairs").mkdir(parents=True, exist_ok=True)
    (out / "all_pairs.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [
        f"# `sol_rl`, {rows[0]['iterations']} iterations, every miniature with every reward",
        "",
        "Written by `python benchmarks/all_pairs.py`. Held-out prompts, same seeds before and after, averaged weights.",
        "The gain of the trained reward is given in standard deviations of the base within a prompt, with its 95 %",
        "interval; the verifier is never trained on.",
        "",
        "| model | reward | before | after | gain, sd | strict accuracy, % | Spearman | grid |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        strict = f"{r['strict_before']:.1f} → {r['strict_after']:.1f}"
        gain = f"{r['gain_sd']:+.2f} [{r['low_sd']:+.2f}, {r['high_sd']:+.2f}]"
        name = f"{r['model']}-{r['reward']}"
        lines.append(
            f"| {r['model']} | {r['reward']} | {r['before']:.4f} | {r['after']:.4f} | {gain} | {strict} "
            f"| {r['spearman']:.3f} | [grid](pairs/{name}.png) |"
        )
        write_grid(load_gallery(runs / name), out / "pairs" / f"{name}.png", rows=GRID_ROWS)
    met = sum(r["gain_sd"] >= NEEDED and r["low_sd"] > 0 and r["strict_after"] >= r["strict_before"] for r in rows)
    lines += ["", f"{met} of {len(rows)} pairs gain at least {NEEDED} sd, with the accuracy not falling."]
    (out / "all_pairs.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def row(model: str, reward: str, result: dict[str, Any]) -> dict[str, Any]:
    """What the table says of one pair."""
    trained, strict = result["rewards"][reward], result["rewards"]["verifier"]
    return {
        "model": model,
        "reward": reward,
        "iterations": result["iterations"],
        "images": result["images"],
        "before": trained["before"],
        "after": trained["after"],
        **{f"{key}_sd": trained[key] / trained["within"] for key in ("gain", "low", "high")},
        "strict_before": 100 * strict["before"],
        "strict_after": 100 * strict["after"],
        "spearman": result["spearman"],
        "seconds": result["seconds"]["total"],
    }


if __name__ == "__main__":
    main()
