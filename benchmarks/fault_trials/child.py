"""What runs in the processes: the programs' own entry points, with somebody who notes what they do."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fault_trials.witness import Witness


def started(target: Callable[..., None], arguments: Sequence[Any], log: str) -> None:
    """Run `target`, with what it prints going to `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    target(*arguments)


def serve(argv: Sequence[str], witness: str) -> None:
    """`solrl-rollout serve`; notes each chunk that is begun, its steps, its end, and each job that is cancelled."""
    from solrl_rollout.cli import main
    from solrl_rollout.engine import Engine
    from solrl_rollout.executor import Executor
    from solrl_rollout.work import Chunk, Job, Scored

    noted = Witness(Path(witness))
    execute, cancel = Executor.execute, Engine.cancel

    def watched_execute(self: Executor, chunk: Chunk, between: Callable[[], None], *rest: Any) -> Scored:
        of = {"job": f"{os.getpid()}/{id(chunk.job)}", "run": chunk.job.run, "prompt": chunk.prompt.id}
        noted.note("begun", **of, seeds=list(chunk.seeds))

        def step() -> None:
            between()
            noted.note("step", **of)

        scored = execute(self, chunk, step, *rest)
        noted.note("made", **of, seeds=list(chunk.seeds))
        return scored

    def watched_cancel(self: Engine, job: Job) -> None:
        cancel(self, job)
        noted.note("cancelled", job=f"{os.getpid()}/{id(job)}", run=job.run)

    Executor.execute = watched_execute  # type: ignore[method-assign]
    Engine.cancel = watched_cancel  # type: ignore[method-assign]
    sys.argv = ["solrl-rollout", *argv]
    main()
