"""A Ray actor killed during an exploration, on one of two simulated nodes: as `worker_killed`."""

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from support.ray_nodes import ray_nodes

from fault_trials.adapters import layout
from fault_trials.findings import Findings, Row
from fault_trials.processes import RolloutService
from fault_trials.worker_killed import kill_workers

_MODULES = Path(__file__).parents[1]


def run(trials: int, findings: Findings) -> None:
    """Run `trials` kills of one of two actors."""
    layout()  # fill the cache before threads start
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="solrl-service-")))
        service = RolloutService(folder, "--workers", "ray:2", "--device", "cpu")
        event_log = str(service.event_log.path)
        # The watched backend in every worker, on one thread, as scores depend on it.
        watched = {"FAULTS_EVENT_LOG": event_log, "PYTHONPATH": str(_MODULES), "OMP_NUM_THREADS": "1"}
        service.environment = stack.enter_context(ray_nodes(2, **watched))
        stack.callback(service.kill)
        service.start()
        kill_workers(service, partial(_actors, event_log), trials, findings)


def _actors(event_log: str) -> set[int]:
    """The processes of actors that write to an event log."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            named = (process / "cmdline").read_bytes().startswith(b"ray::WorkerActor")
            if named and event_log.encode() in (process / "environ").read_bytes():
                found.add(int(process.name))
        except OSError:
            continue  # it has ended
    return found


ROW = Row(
    "ray-worker-killed",
    "one of two Ray actors killed, on two simulated nodes: as worker-killed",
    full=20,
    short=1,
    run=run,
)
