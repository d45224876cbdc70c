"""Runs that are missing, each in a process of its own; a stopped one resumes from its last checkpoint."""

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
from paper.finished import file_of
from paper.worker import Job

WORKER = Path(__file__).with_name("worker.py")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def run_missing(
    experiments: Sequence[Experiment],
    folder: Path,
    *,
    jobs: int,
    until: float,
    device: str = "auto",
    shown_seed: int | None = None,
) -> dict[str, str]:
    """Do the runs whose file is missing, in this order, `jobs` at a time.

    Args:
        experiments: the runs.
        folder: folder of all runs.
        jobs: parallel processes; they share the GPUs evenly, and the CPU cores.
        until: monotonic time at which the processes are stopped.
        device: device of the runs; `auto` and `cuda` use every visible GPU, one for each process.
        shown_seed: seed of the runs whose images are kept.

    Returns:
        Name → outcome of each run that was begun: "done", "stopped", or "failed …" with its log.

    Raises:
        ConfigError: the visible GPUs differ.
    """
    missing = [one for one in experiments if not file_of(one, folder).is_file()]
    threads = str(max(1, math.ceil(len(os.sched_getaffinity(0)) / jobs)))
    # A run makes too few passes for compilation to pay.
    uncompiled = {"TORCHDYNAMO_DISABLE": "1"}
    environment = {**os.environ, **uncompiled, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    free: SimpleQueue[Mapping[str, str]] = SimpleQueue()
    for slot in slots(jobs, visible_gpus(device)):
        free.put(slot)
    outcomes: dict[str, str] = {}

    def run(numbered: tuple[int, Experiment]) -> None:
        number, one = numbered
        if time.monotonic() >= until:
            return
        log = folder / "logs" / f"{one.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        job = Job(one, str(folder), jobs, device, one.seed == shown_seed)
        started = time.monotonic()
        timeout = None if until == math.inf else max(0.0, until - started)
        command = [sys.executable, str(WORKER), job.text()]
        slot = free.get()
        own = environment | slot
        try:
            with log.open("a") as output:
                subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True, timeout=timeout, env=own)
            outcome = "done"
        except subprocess.TimeoutExpired:
            outcome = "stopped"
        except subprocess.CalledProcessError as error:
            outcome = f"failed with {error.returncode}, see {log}"  # the other runs continue
        finally:
            free.put(slot)
        outcomes[one.name] = outcome
        seconds = time.monotonic() - started
        print(f"{number} of {len(missing)} {one.name}: {outcome}, {seconds:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, enumerate(missing, start=1)))
    return outcomes


def visible_gpus(device: str) -> list[str]:
    """GPUs for the runs of a device, in terms of CUDA_VISIBLE_DEVICES; none if the device is a CPU or one given GPU.

    Raises:
        ConfigError: they differ, and rounding with them.
    """
    if device not in ("auto", "cuda"):
        return []
    count = torch.cuda.device_count()
    kinds = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    if len(kinds) > 1:
        raise ConfigError(f"got different GPUs, {' and '.join(kinds)}; expected equal ones: choose by {VISIBLE}")
    visible = os.environ.get(VISIBLE)
    numbers = visible.split(",") if visible else map(str, range(count))
    return [number.strip() for number in numbers][:count]


def slots(jobs: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Environment of each of `jobs` slots, which names its only GPU; without GPUs it is empty."""
    return [{VISIBLE: gpus[number % len(gpus)]} if gpus else {} for number in range(jobs)]
