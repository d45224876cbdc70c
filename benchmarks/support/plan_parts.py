"""Scores of `plan_fidelity.py` by several processes, each with a stretch of the prompts."""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file

SCRIPT = Path(__file__).parents[1] / "plan_fidelity.py"
PASSED_ON = ("prompts", "candidates", "solver", "device")


def stretches(begun: int, prompts: int, jobs: int) -> list[tuple[int, int]]:
    """(first, last) of the prompts of each process, as even as can be; none without prompts."""
    edges = [begun + (prompts - begun) * number // jobs for number in range(jobs + 1)]
    return [(first, last) for first, last in pairwise(edges) if first < last]


def measure_in_parts(model: str, prompts: int, args: argparse.Namespace, solver_file: Path, file: Path) -> None:
    """Score the groups that `file` lacks, and add them to it.

    A process keeps its scores in a folder of its own, from which the same command resumes; the folders go at the end.

    Args:
        model: its name.
        prompts: number of groups.
        args: see `plan_fidelity.options`.
        solver_file: the fitted solver, which all processes share.
        file: scores of all groups.
    """
    begun = len(load_file(file)["true"]) if file.is_file() else 0
    parts = stretches(begun, prompts, args.jobs)
    folders = [file.with_suffix(f".{first}-{last}") for first, last in parts]
    given = [str(word) for name in PASSED_ON for word in (f"--{name}", getattr(args, name))]
    threads = str(max(1, len(os.sched_getaffinity(0)) // args.jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(args.jobs) as pool:
        bar = progress.add_task(f"{model}, groups", total=prompts, completed=begun)

        def run(stretch: tuple[int, int], folder: Path) -> int:
            folder.mkdir(exist_ok=True)
            shutil.copyfile(solver_file, folder / solver_file.name)
            command = [sys.executable, str(SCRIPT), "--models", model, *given]
            command += ["--precisions", *args.precisions, "--scores", str(folder), "--stretch", *map(str, stretch)]
            with (folder / "log").open("w") as log:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
                for _ in process.stdout or ():
                    progress.advance(bar)
            return process.wait()

        codes = list(pool.map(run, parts, folders))
    failed = [str(folder / "log") for folder, code in zip(folders, codes, strict=True) if code]
    if failed:
        sys.exit(f"{len(failed)} of {len(codes)} processes failed, see {', '.join(failed)}; run the command again")
    join([*([file] if begun else []), *(folder / file.name for folder in folders)], file)
    for folder in folders:
        shutil.rmtree(folder)


def join(parts: list[Path], file: Path) -> None:
    """Write the scores of consecutive stretches to one file. What the first stretch alone measured stays as it is."""
    found = [load_file(part) for part in parts]
    if not found:
        return
    everywhere = set.intersection(*(set(one) for one in found))
    scores = {name: torch.cat([one[name] for one in found]) for name in everywhere}
    scores |= {name: value for one in found for name, value in one.items() if name not in everywhere}
    partial = file.with_suffix(".partial")
    save_file(scores, partial)
    partial.replace(file)
