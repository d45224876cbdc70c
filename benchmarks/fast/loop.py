"""Seconds of an iteration of `fast` at true size by the trainer's own loop: `python benchmarks/fast/loop.py flux`.

Writes the model and a reward of HPSv2's size with random weights (FLUX.1: 38 GB) to --weights, trains on one GPU that
explores in FP8, regenerates and trains, and adds the last iteration to benchmarks/results/fast.json. The first
iteration compiles. `python benchmarks/fast confirm --render` puts it on the page.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.presets import resolve
from support.results import device_name
from support.true_size import written
from training_phase import PRESETS

from fast.cost import RESULTS, SHAPES

SETTINGS = (
    "prompts=shapes",
    "explore.precision=fp8",
    "checkpoint_every=1000",
    "evaluate.prompts=2",
    "evaluate.seeds=1",
    "evaluate.steps=2",
    "evaluate.fidelity_prompts=0",
    "evaluate.stop_after=null",
    "evaluate.every=1000",
    "device=cuda",
)
"""Small evaluations, which are no part of an iteration; they begin and end the run."""


def main() -> None:
    """Train, and store the last iteration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--weights", type=Path, default=Path("runs/true_size"), help="folder of the random weights")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    model, reward = written(args.weights, "cuda", args.model)
    preset, folder = f"{PRESETS[args.model]}/fast/hpsv2", Path("runs/fast") / f"true-{args.model}"
    settings = (*SETTINGS, f"run=true-{args.model}", f"model={model}", f"reward_options={json.dumps(reward)}")
    command = [sys.executable, "-m", "solrl_trainer", "run", "--preset", preset, "--output", str(folder)]
    command += ["--iterations", str(args.iterations), *(part for each in settings for part in ("--set", each))]
    begun = time.time()
    subprocess.run(command, check=True)
    store(args.model, folder, args.out, begun)


def store(model: str, folder: Path, out: Path, begun: float) -> None:
    """Add the last iteration of a run's folder to fast.json: its phases, and its time by the clock.

    "start" is the time from the command, at `begun`, to the first push that a later iteration does not take: loading
    and compiling.
    """
    config = resolve(f"{PRESETS[model]}/fast/hpsv2", overrides=["explore.precision=fp8"]).config
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["event"] in ("push", "iteration")]
    first, (before, iteration, after) = lines[1], lines[-3:]
    clock = after["time"] - before["time"]
    path = out / "fast.json"
    stored = json.loads(path.read_text())
    stored.setdefault("loop", {})[model] = {
        "device": device_name("cuda"),
        "prompts": config.explore.prompts,
        "steps": config.explore.steps,
        "seconds": iteration["seconds"] | after["seconds"],
        "clock": clock,
        "start": first["time"] - begun - clock,
    }
    path.write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main()
