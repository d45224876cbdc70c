"""Entry points of the child processes: the real commands, instrumented to record what they do."""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fault_trials.event_log import EventLog
from fault_trials.kill_points import KillPoint, after, before, replace


def serve(argv: Sequence[str], event_log: str, environment: Mapping[str, str]) -> None:
    """`solrl-rollout serve`; notes each chunk that is queued, begun or lost, its steps, and its end."""
    os.environ.update(environment)
    from solrl_rollout.__main__ import main
    from solrl_rollout.engine.engine import WorkerHandle
    from solrl_rollout.engine.queue.scheduler import Scheduler
    from solrl_rollout.engine.workers import remote

    log = EventLog(Path(event_log))

    def note(event: str, chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            log.add(event, run=chunk.job.run, prompt=chunk.prompt.id)

    before(Scheduler, "submit", lambda _, chunks, **named: note("queued", chunks))
    before(WorkerHandle, "put_back", lambda _, begun: note("lost", begun))
    watch_chunks(log)
    # Worker processes load their backend by this name.
    os.environ["FAULTS_EVENT_LOG"] = event_log
    replace(remote, "importable", lambda _: f"{__name__}:{watched_backend.__name__}")
    sys.argv = ["solrl-rollout", *argv]
    main()


def watched_backend(spec: Any, settings: Any) -> Any:
    """The backend of a worker process, which notes its chunks like the service."""
    from solrl_rollout.engine.backends import load_backend

    watch_chunks(EventLog(Path(os.environ["FAULTS_EVENT_LOG"])))
    return load_backend(spec, settings)


def watch_chunks(log: EventLog) -> None:
    """Note each chunk that this process begins, its steps and its end."""
    from solrl_rollout.engine.chunk_scorer import ChunkScorer
    from solrl_rollout.engine.model_runner import ModelRunner
    from solrl_rollout.engine.work import Chunk, GeneratedChunk

    def note(event: str, chunk: Chunk) -> None:
        if chunk.job.tenant:  # the warm-up is nobody's
            log.add(event, pid=os.getpid(), run=chunk.job.run, prompt=chunk.prompt.id, seeds=list(chunk.seeds))

    generate = ModelRunner.generate

    def watched_generate(self: ModelRunner, chunk: Chunk, between: Callable[[], None], *rest: Any) -> GeneratedChunk:
        note("begun", chunk)

        def step() -> None:
            between()
            note("step", chunk)

        return generate(self, chunk, step, *rest)

    replace(ModelRunner, "generate", watched_generate)
    after(ChunkScorer, "score_here", lambda _, generated: note("made", generated.chunk))


def train(argv: Sequence[str], event_log: str, kill_point: KillPoint | None, victim: int) -> None:
    """`solrl-train run`; notes what each iteration trains on, and the random numbers and optimiser it begins with.

    `kill_point` kills this process if it is rank `victim`.
    """
    from solrl_trainer.__main__ import main
    from solrl_trainer.policy import update
    from solrl_trainer.records.run_log import RunLog

    log, rank = EventLog(Path(event_log)), os.environ.get("RANK", "0")

    def gathered(_: RunLog, iteration: int, samples: Any) -> None:
        seeds = [group.seeds for group in samples.groups]
        log.add("gathered", rank=rank, iteration=iteration, seeds=seeds, latents=digest(samples.latents))

    def begins(updater: update.Updater, _: Any, iteration: int, *progress: Any) -> None:
        # In one order, since a restored state lists the same values in another.
        states = [sorted(state.items()) for _, state in sorted(updater.optimizer.state_dict()["state"].items())]
        moments = digest(*(value for state in states for _, value in state))
        weights = digest(*updater.policy.parameters)
        log.add("begins", rank=rank, iteration=iteration, weights=weights, optimizer=moments)

    def random(units: int, steps: int, fraction: float, generator: torch.Generator) -> None:
        log.add("random", rank=rank, state=digest(generator.get_state()))

    before(RunLog, "samples_ready", gathered)
    before(update.Updater, "update", begins)
    before(update, "training_pairs", random)
    if kill_point is not None and rank == str(victim):
        kill_point.plant()
    sys.argv = ["solrl-train", *argv]
    main()


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
