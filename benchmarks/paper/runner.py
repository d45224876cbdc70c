"""Runs that are missing, each in a process of its own; a stopped one resumes from its last checkpoint."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paper.experiments import Experiment
from paper.finished import file_of
from paper.worker import Job

WORKER = Path(__file__).with_name("worker.py")


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
        jobs: parallel processes; they share the device and the CPU cores.
        until: monotonic time at which the processes are stopped.
        device: device of the runs.
        shown_seed: seed of the runs whose images are kept.

    Returns:
        Name → outcome of each run that was begun: "done", "stopped", or "failed …" with its log.
    """
    missing = [one for one in experiments if not file_of(one, folder).is_file()]
    threads = str(max(1, math.ceil(len(os.sched_getaffinity(0)) / jobs)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
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
        try:
            with log.open("a") as output:
                subprocess.run(
                    command, stdout=output, stderr=subprocess.STDOUT, check=True, timeout=timeout, env=environment
                )
            outcome = "done"
        except subprocess.TimeoutExpired:
            outcome = "stopped"
        except subprocess.CalledProcessError as error:
            outcome = f"failed with {error.returncode}, see {log}"  # the other runs continue
        outcomes[one.name] = outcome
        seconds = time.monotonic() - started
        print(f"{number} of {len(missing)} {one.name}: {outcome}, {seconds:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, enumerate(missing, start=1)))
    return outcomes
