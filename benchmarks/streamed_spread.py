"""Whether training on samples as they arrive changes learning: `python benchmarks/streamed_spread.py --jobs 2`.

With `algorithm.global_std`, a streamed iteration divides a prompt's advantages by the deviation of the iteration before
and of the prompt itself; a whole one, by that of all its samples. Both are trained from the same seeds with one
optimiser step per iteration, at a service that regenerates. Gains in standard deviations of the base, paired by seed
and prompt. Writes docs/results/streamed_spread.{json,md}.
"""

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from paper.experiments import Programme
from paper.finished import read_finished
from paper.intervals import over_seeds_and_prompts
from paper.runner import run_missing
from paper.tables.common import as_json, gains
from support.results import Results, options, table

SETTINGS = {
    "explore.source": "service",
    "explore.prompts": 8,
    "regenerate.at": "service",
    "optimizer.updates": 1,
    "optimizer.learning_rate": 3e-3,
    "evaluate.every": 0,
}
KINDS = ("streamed", "whole")
JUDGED = ("clipscore", "judge", "verifier")


def main() -> None:
    """Do the missing runs, and write the page."""
    parser = options(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/streamed_spread"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=math.inf)
    args = parser.parse_args()
    results = Results("streamed_spread", args.out, page)
    if args.render:
        return results.show()
    programme = Programme(rewards=("clipscore",), seeds=tuple(args.seeds), iterations=args.iterations, changes=SETTINGS)
    arms = {kind: programme.over_seeds("sol_rl", {"optimizer.streamed": kind == "streamed"}) for kind in KINDS}
    every = [one for pair in zip(*arms.values(), strict=True) for one in pair]
    until = time.monotonic() + 60 * args.minutes
    print(run_missing(every, args.runs, jobs=args.jobs, until=until, device=args.device), file=sys.stderr)
    runs = read_finished(every, args.runs)
    pairs = [seed for seed in range(len(args.seeds)) if all(arms[kind][seed].name in runs for kind in KINDS)]
    about = {"machine": next(iter(runs.values())).machine, "iterations": args.iterations}
    for reward in JUDGED:
        both = {kind: gains([runs[arms[kind][seed].name] for seed in pairs], reward) for kind in KINDS}
        both["difference"] = both["streamed"] - both["whole"]
        estimates = {kind: as_json(over_seeds_and_prompts(values)) for kind, values in both.items()}
        results.add({"reward": reward, **estimates, "by_seed": both["difference"].mean(1).tolist(), **about}, "reward")
    results.show()


def page(found: Mapping[str, Any]) -> str:
    """Markdown page."""
    rows = found["rows"]
    about, seeds = rows[0], rows[0]["difference"]["seeds"]
    lines = [
        "# Does training while samples arrive change learning?",
        "",
        "A streamed iteration divides advantages by the deviation of the iteration before and of the prompt itself, a",
        "whole one by that of all its samples. Sol-RL on CLIPScore, mini-sana, one optimiser step per iteration,",
        f"{about['iterations']} iterations, {seeds} seeds, on {about['machine']}.",
        "Gains in standard deviations of the base,",
        "paired by seed and prompt, with 95 % intervals.",
        "",
    ]
    cells = [(row["reward"], *(_said(row[kind]) for kind in (*KINDS, "difference"))) for row in rows]
    return "\n".join([*lines, *table(("judged by", *KINDS, "difference"), cells), ""])


def _said(estimate: Mapping[str, float]) -> str:
    return f"{estimate['mean']:+.3f} [{estimate['low']:+.3f}, {estimate['high']:+.3f}]"


if __name__ == "__main__":
    main()
