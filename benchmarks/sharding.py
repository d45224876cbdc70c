"""A base that is sharded over the GPUs against one that each has: `python benchmarks/sharding.py --weights FOLDER`.

Trains one iteration of FLUX.1 at true size with random weights, written to FOLDER (38 GB), under torchrun: once with
`optimizer.shard_base=true`, once with false. Compares the memory of each GPU, the seconds, and the norm of the first
gradient. Writes benchmarks/results/sharding.{json,md}.
"""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from solrl_trainer.records.metrics_file import read_metrics
from support.results import Results, Row, device_name, options, table
from support.true_size import written

OUTPUT = Path("runs/sharding")
SETTINGS = (
    *("prompts=shapes", "iterations=1", "algorithm.timestep_fraction=0.1", "lora.rank=32", "explore.precision=bf16"),
    *("explore.candidates=24", "explore.keep=8", "explore.steps=2", "regenerate.steps=4"),
    *("evaluate.prompts=4", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.fidelity_prompts=0"),
)
"""One small group of each rank; memory follows the micro-batch, which is the preset's."""
HEAD = (
    "base",
    "device",
    "GPUs",
    "memory of a GPU, GiB",
    "exploring, s",
    "regenerating, s",
    "training, s",
    "norm of the gradient",
)


def main() -> None:
    """Train both ways; print the table and write it."""
    parser = options(__doc__, device="cuda")
    parser.add_argument("--gpus", type=int, default=4, help="ranks, each with a GPU")
    parser.add_argument("--weights", type=Path, default=Path("runs/true_size"), help="folder of the random weights")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of both runs, key=value")
    args = parser.parse_args()
    results = Results("sharding", args.out, page)
    if not args.render:
        model, reward = written(args.weights, args.device)
        for base in ("sharded", "whole"):
            settings = (
                *SETTINGS,
                *(f"model={model}", f"reward_options={json.dumps(reward)}", f"device={args.device}"),
                *(f"explore.prompts={args.gpus}", f"optimizer.shard_base={str(base == 'sharded').lower()}", *args.set),
            )
            row = {
                "base": base,
                "gpus": args.gpus,
                "device": device_name(args.device),
                **trained(base, args.gpus, settings),
            }
            results.add(row, "base", "gpus", "device")
    results.show()


def trained(name: str, gpus: int, settings: Sequence[str]) -> Row:
    """Train one iteration on all GPUs; the peak of each GPU's used memory, and the iteration's figures."""
    folder = OUTPUT / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}", "-m", "solrl_trainer", "run"]
    command += ["--preset", "flux1/sol_rl/hpsv2", "--output", str(folder)]
    command += [part for setting in settings for part in ("--set", setting)]
    with watched_memory() as peaks:
        subprocess.run(command, check=True, stdout=sys.stderr)
    (iteration,) = (line for line in read_metrics(folder / "metrics.jsonl") if line["event"] == "iteration")
    return {"memory": peaks, "seconds": iteration["seconds"], "gradient": iteration["grad_norm"]}


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Yields the largest used memory of each GPU in MiB, updated every half second; empty without GPUs."""
    peaks: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while shutil.which("nvidia-smi") and not done.wait(0.5):
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            used = [int(line) for line in subprocess.check_output(query, text=True).split()]
            peaks[:] = map(max, used, peaks or used)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def page(found: Mapping[str, Any]) -> str:
    """Markdown page."""
    rows = found["rows"]
    lines = [
        "# Sharding the base",
        "",
        "By `python benchmarks/sharding.py`: an iteration of FLUX.1 with random weights and",
        "small groups, on several GPUs. Memory is the peak that the driver reports, of the GPU that uses most. Both",
        "runs have the same prompts and seeds.",
        "",
        *table(HEAD, map(_cells, rows)),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> Sequence[str]:
    seconds = (f"{row['seconds'][name]:.1f}" for name in ("explore", "regenerate", "train"))
    memory = f"{max(row['memory']) / 1024:.1f}" if row["memory"] else "–"
    return row["base"], row["device"], str(row["gpus"]), memory, *seconds, f"{row['gradient']:.6g}"


if __name__ == "__main__":
    main()
