"""Runs, each in a process of its own; a stopped one resumes from its last checkpoint."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
from solrl_trainer.settings.presets import ConfigError

from paper.experiments import Experiment

WORKER = Path(__file__).with_name("worker.py")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def run_all(experiments: Sequence[Experiment], folder: Path, *, jobs: int, until: float) -> set[str]:
    """Do runs, in this order, `jobs` at a time.

    Args:
        experiments: the runs.
        folder: folder of all runs.
        jobs: parallel processes; they share the visible GPUs evenly, and the CPU cores.
        until: monotonic time at which the processes are stopped.

    Returns:
        Names of the runs that were stopped or failed.

    Raises:
        ConfigError: the visible GPUs differ.
    """
    environment = {
        **os.environ,
        "TORCHDYNAMO_DISABLE": "1",  # a run makes too few passes for compilation to pay
        "OMP_NUM_THREADS": str(max(1, math.ceil(len(os.sched_getaffinity(0)) / jobs))),
        "OMP_WAIT_POLICY": "passive",
    }
    gpus, free = visible_gpus(), SimpleQueue[Mapping[str, str]]()
    for number in range(jobs):
        free.put({VISIBLE: gpus[number % len(gpus)]} if gpus else {})
    unfinished: set[str] = set()

    def run(number: int, one: Experiment) -> None:
        started = time.monotonic()
        if started >= until:
            return
        log = folder / "logs" / f"{one.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, WORKER, folder, jobs, one.preset, one.seed, *one.settings]
        timeout = None if until == math.inf else until - started
        slot, outcome = free.get(), "done"
        try:
            with log.open("a") as output:
                subprocess.run(
                    list(map(str, command)),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=True,
                    timeout=timeout,
                    env=environment | slot,
                )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:  # the other runs continue
            unfinished.add(one.name)
            outcome = "stopped" if isinstance(error, subprocess.TimeoutExpired) else f"failed, see {log}"
        finally:
            free.put(slot)
        seconds = time.monotonic() - started
        print(f"{number} of {len(experiments)} {one.name}: {outcome}, {seconds:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, range(1, len(experiments) + 1), experiments))
    return unfinished


def visible_gpus() -> list[str]:
    """The visible GPUs, in terms of CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: they differ, and rounding with them.
    """
    count = torch.cuda.device_count()
    kinds = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    if len(kinds) > 1:
        raise ConfigError(f"got different GPUs, {' and '.join(kinds)}; expected equal ones: choose by {VISIBLE}")
    visible = os.environ.get(VISIBLE)
    numbers = visible.split(",") if visible else map(str, range(count))
    return [number.strip() for number in numbers][:count]
