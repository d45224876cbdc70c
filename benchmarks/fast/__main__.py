"""GPU time to a reward: `python benchmarks/fast confirm --jobs 20 --minutes 9`.

Does the missing runs of a stage, adds the finished ones to benchmarks/results/fast.json, and writes fast.md. The time
of a run is computed from the seconds of a prompt that equal_gpus.json has for large models on one H200. A run that does
not reach a share of the baseline's best gain counts as 1.5 × the baseline's iterations. `--render` runs nothing.
Runs share a GPU better under MPS: `nvidia-cuda-mps-control -d`.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1]))

from paper.finished import file_of
from paper.runner import run_all

from fast.arms import STAGES, Stage, World, experiment
from fast.cost import SHAPES, seconds_of_iteration
from fast.law import section
from fast.page import page

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """Run what is missing and write the page; returns 1 if runs are still missing, which `--render` does not ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--runs", type=Path, default=Path("runs/fast"))
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, shared by all visible GPUs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit; run again to continue")
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    stage, path = STAGES[args.stage], args.out / "fast.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    wanted = {
        (args.stage, world.name, arm, seed): (world, experiment(stage, world, arm, seed))
        for seed in stage.seeds
        for world in stage.worlds
        for arm in args.arms or stage.arms
    }
    kept = {_key(row): row for row in stored["rows"]}
    if not args.render:
        todo = [
            run for key, (_, run) in wanted.items() if key not in kept and not file_of(run.name, args.runs).is_file()
        ]
        run_all(todo, args.runs, jobs=args.jobs, until=time.monotonic() + 60 * args.minutes)
    for key, (world, run) in wanted.items():
        file = file_of(run.name, args.runs)
        if file.is_file():
            kept[key] = row_of(key, world, json.loads(file.read_text()), run.config, stage)
    stored["rows"] = list(kept.values())
    path.write_text(json.dumps(stored) + "\n")
    path.with_suffix(".md").write_text("\n".join(filter(None, (page(stored), section(stored["rows"])))))
    if args.render:
        return 0
    missing = sum(key not in kept for key in wanted)
    print(f"{missing} of {len(wanted)} runs are missing", file=sys.stderr)
    return int(bool(missing))


def row_of(
    key: tuple[str, str, str, int], world: World, record: dict[str, Any], config: Any, stage: Stage
) -> dict[str, Any]:
    """What is kept of a finished run: its settings, its seconds per iteration and its held-out curve."""
    names = [name for name in (world.reward, "judge") if name in record["within"]]
    name, world_name, arm, seed = key
    recipe, changes = stage.arms[arm]
    return {
        "stage": name,
        "world": world_name,
        "arm": arm,
        "seed": seed,
        "recipe": recipe,
        "changes": dict(changes),
        "machine": record["machine"],
        "iterations": config.iterations,
        "seconds": {shape: seconds_of_iteration(config, shape) for shape in SHAPES},
        "curve": [[version, *(round(means[one], 5) for one in names)] for version, means in record["curve"]],
        "within": [record["within"][one] for one in names],
        "stopped": record["stopped"],
    }


def _key(row: dict[str, Any]) -> tuple[str, str, str, int]:
    return row["stage"], row["world"], row["arm"], row["seed"]


if __name__ == "__main__":
    sys.exit(main())
