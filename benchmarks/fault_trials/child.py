"""Entry points of the child processes: the real commands, instrumented to record what they do."""

import hashlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fault_trials.event_log import EventLog
from fault_trials.kill_points import KillPoint, replace


def started(target: Callable[..., None], arguments: Sequence[Any], log: str) -> None:
    """Run `target` with its output redirected to `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    target(*arguments)


def command(main: Callable[[], object], argv: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
    """Run a command's entry point in this folder and environment; modules on PYTHONPATH can be imported."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.argv = list(argv)
    main()


def as_ranks(size: int, port: int, target: Callable[..., None], *arguments: Any) -> None:
    """Run `target` as torchrun does on this machine, except that the ranks are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="ranks",
        max_restarts=0,
        start_method="fork",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
    )
    elastic_launch(config, _as_rank)(target, *arguments)


def _as_rank(target: Callable[..., None], *arguments: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forked with torchrun's handler, which a started rank does not have
    torch.set_num_threads(1)
    target(*arguments)


def serve(argv: Sequence[str], event_log: str, environment: Mapping[str, str]) -> None:
    """`solrl-rollout serve`; notes each chunk that is queued, begun or lost, its steps, and its end."""
    os.environ.update(environment)
    from solrl_rollout.cli import main
    from solrl_rollout.engine.engine import WorkerHandle
    from solrl_rollout.engine.queue.scheduler import Scheduler
    from solrl_rollout.engine.work import Chunk
    from solrl_rollout.engine.workers import remote

    log, submit, put_back = EventLog(Path(event_log)), Scheduler.submit, WorkerHandle.put_back

    def watched_submit(self: Scheduler, chunks: list[Chunk], *, first: bool = False) -> None:
        for chunk in chunks:
            log.add("queued", run=chunk.job.run, prompt=chunk.prompt.id)
        submit(self, chunks, first=first)

    def watched_put_back(self: WorkerHandle, begun: Sequence[Chunk]) -> None:
        for chunk in begun:
            log.add("lost", run=chunk.job.run, prompt=chunk.prompt.id)
        put_back(self, begun)

    watch_chunks(log)
    replace(Scheduler, "submit", watched_submit)
    replace(WorkerHandle, "put_back", watched_put_back)
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
    from solrl_rollout.engine.work import Chunk, GeneratedChunk, ScoredChunk

    def note(event: str, chunk: Chunk, **more: Any) -> None:
        if chunk.job.tenant:  # the warm-up is nobody's
            job = f"{os.getpid()}/{id(chunk.job)}"
            log.add(event, pid=os.getpid(), job=job, run=chunk.job.run, prompt=chunk.prompt.id, **more)

    generate, score = ModelRunner.generate, ChunkScorer.score_here

    def watched_generate(self: ModelRunner, chunk: Chunk, between: Callable[[], None], *rest: Any) -> GeneratedChunk:
        note("begun", chunk, seeds=list(chunk.seeds))

        def step() -> None:
            between()
            note("step", chunk)

        return generate(self, chunk, step, *rest)

    def watched_score(self: ChunkScorer, generated: GeneratedChunk) -> ScoredChunk:
        scored = score(self, generated)
        note("made", generated.chunk, seeds=list(generated.chunk.seeds))
        return scored

    replace(ModelRunner, "generate", watched_generate)
    replace(ChunkScorer, "score_here", watched_score)


def train(argv: Sequence[str], event_log: str, kill_point: KillPoint | None, victim: int) -> None:
    """`solrl-train run`; notes what each iteration trains on, and the random numbers and optimiser it begins with.

    `kill_point` kills this process if it is rank `victim`.
    """
    from solrl_trainer.commands.cli import main
    from solrl_trainer.policy import update
    from solrl_trainer.policy.update import Updater
    from solrl_trainer.records.run_log import RunLog
    from solrl_trainer.rollouts.iteration import IterationSamples

    log, rank = EventLog(Path(event_log)), os.environ.get("RANK", "0")
    ready, pairs, optimise = RunLog.samples_ready, update.training_pairs, Updater.update

    def watched_samples(self: RunLog, iteration: int, samples: IterationSamples) -> None:
        seeds = [group.seeds for group in samples.groups]
        log.add("gathered", rank=rank, iteration=iteration, seeds=seeds, latents=digest(samples.latents))
        ready(self, iteration, samples)

    def watched_update(self: Updater, samples: Any, iteration: int, *progress: Any) -> Any:
        # In one order, since a restored state lists the same values in another.
        states = [sorted(state.items()) for _, state in sorted(self.optimizer.state_dict()["state"].items())]
        moments = [value for state in states for _, value in state]
        weights = digest(*self.policy.parameters)
        log.add("begins", rank=rank, iteration=iteration, weights=weights, optimizer=digest(*moments))
        return optimise(self, samples, iteration, *progress)

    def watched_pairs(units: int, steps: int, fraction: float, generator: torch.Generator) -> Any:
        log.add("random", rank=rank, state=digest(generator.get_state()))
        return pairs(units, steps, fraction, generator)

    replace(RunLog, "samples_ready", watched_samples)
    replace(Updater, "update", watched_update)
    replace(update, "training_pairs", watched_pairs)
    if kill_point is not None and rank == str(victim):
        kill_point.plant()
    sys.argv = ["solrl-train", *argv]
    main()


def digest(*tensors: torch.Tensor) -> str:
    """Digest of the tensors' bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
