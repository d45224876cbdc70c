"""The training loop: explore, select, regenerate, score, train, decay, checkpoint, push."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from solrl_core.adapter import adapter_digest, encode_adapter
from solrl_core.families.base import stack
from solrl_core.fidelity import rank_fidelity

from solrl_trainer import checkpoints
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.client import RolloutClient, rollout_token
from solrl_trainer.config import RunConfig
from solrl_trainer.evaluation import Evaluation, evaluate
from solrl_trainer.explore import Kept
from solrl_trainer.metrics import Metrics, Stopwatch, own_time
from solrl_trainer.policy import OLD
from solrl_trainer.rollouts import Gathered, merge, regenerate, seed_root
from solrl_trainer.session import Session
from solrl_trainer.telling import Teller
from solrl_trainer.update import UpdateFigures


class Reporter(Protocol):
    """Shows progress to a person."""

    def phase(self, iteration: int, name: str) -> None:
        """A phase of an iteration begins."""

    def finished(self, line: dict[str, Any]) -> None:
        """An iteration is done; `line` is what metrics.jsonl got, with the seconds of the push."""

    def note(self, text: str) -> None:
        """Something worth a line."""


@dataclass
class Result:
    """What a run comes to."""

    prompts: list[str]
    """Held-out prompts, in the order of the evaluations."""
    before: Evaluation
    after: Evaluation
    seconds: dict[str, float]
    """By phase, and in all; of a resumed run, what went before is counted in. Exploring at the service goes on beside
    the other phases, and "wait" is what the trainer waited for it."""
    spearman: float | None
    gathered: Gathered | None
    """The last iteration's samples."""


def train(config: RunConfig, reporter: Reporter, *, resume: bool = False) -> Result:
    """Run a whole training, or the rest of one.

    Raises:
        ProblemError: the service refuses, differs or is gone.
        FloatingPointError: a loss or gradient that is not finite.
    """
    metrics = Metrics(config.output / "metrics.jsonl")
    folder = config.output / "checkpoints"
    found = checkpoints.latest(folder, config) if resume else None
    started = time.perf_counter()
    with _client(config) as client, _teller(config, reporter) as teller:
        reporter.note(f"loading {config.model}" + (f" and comparing digests with {client.url}" if client else ""))
        session = Session.open(config, client, reporter.note)
        if client is not None:
            client.patience = config.patience
        policy, rollouts = session.policy, session.rollouts

        version = 0
        if found is not None:
            checkpoints.restore(found, policy, session.optimizer)
            version = found.version
            reporter.note(f"continuing after {version} iterations")
        own = {line["digest"] for line in metrics.lines("iteration")} if resume else set()
        adapters = found.adapters if found else {0: encode_adapter(policy.adapter(policy.tensors(OLD)))}
        # Before the lines that prove what is this run's own are dropped.
        rollouts.start(adapters, own)
        # A run that stopped before its first checkpoint leaves lines too.
        metrics.rewind(version if found is not None else -1)
        earlier = metrics.seconds()

        clock = Stopwatch()
        with clock.measure("evaluate"):
            before = _evaluate(session, metrics, reporter, 0)
            _measure_fidelity(session, adapters[version], version, metrics, reporter)

        gathered: Gathered | None = None
        for iteration in range(version, config.iterations):
            watch = Stopwatch()
            phase = _phases(reporter, watch, iteration, config)
            gathered = rollouts.gather(iteration, phase)
            watch.seconds["explore"] = gathered.seconds
            if teller is not None:
                teller.gathered(iteration, gathered)

            with phase("train"):
                update = session.updater.update(_samples(session, gathered), iteration)
                policy.decay_and_average(iteration, config.policy)
                pushed = encode_adapter(policy.adapter(policy.tensors(OLD)))
                adapters = _newest(adapters | {iteration + 1: pushed}, config.explore.lag + 1)

            # The line comes before the checkpoint, which comes before the push: a run that breaks off at any of
            # them and is resumed neither loses a line nor pushes other bytes under the same version.
            line = _line(iteration, gathered, pushed, update, watch, config)
            metrics.log("iteration", **line)
            if (iteration + 1) % config.checkpoint_every == 0 or iteration + 1 == config.iterations:
                checkpoints.save(folder, iteration + 1, adapters, policy, session.optimizer, config)
            with phase("push"):
                rollouts.push(iteration + 1, pushed)
            metrics.log("push", version=iteration + 1, seconds={"push": watch.seconds["push"]})
            whole = {**line, "seconds": dict(watch.seconds)}
            if teller is not None:
                teller.finished(whole, gathered)
            reporter.finished(whole)
            clock.add(watch)

            every = config.evaluate.every
            if every and (iteration + 1) % every == 0 and iteration + 1 < config.iterations:
                with clock.measure("evaluate"):
                    _evaluate(session, metrics, reporter, iteration + 1)
                    merge(session.generator, pushed)

        with clock.measure("evaluate"):
            after = _evaluate(session, metrics, reporter, config.iterations)
    total = {"total": time.perf_counter() - started + sum(own_time(earlier).values())}
    clock.seconds = {k: clock.seconds.get(k, 0.0) + earlier.get(k, 0.0) for k in {**earlier, **clock.seconds}}
    held_out = [prompt.text for prompt in session.test_prompts]
    measured = metrics.last("fidelity")
    return Result(held_out, before, after, clock.seconds | total, measured["spearman"] if measured else None, gathered)


def _client(config: RunConfig) -> AbstractContextManager[RolloutClient | None]:
    if config.explore.source != "service":
        return nullcontext()
    return RolloutClient(config.rollout_url, token=rollout_token())


def _teller(config: RunConfig, reporter: Reporter) -> AbstractContextManager[Teller | None]:
    return nullcontext() if config.explore.source != "service" else Teller(config, reporter.note)


def _newest(adapters: dict[int, bytes], count: int) -> dict[int, bytes]:
    return {version: adapters[version] for version in sorted(adapters)[-count:]}


def _phases(
    reporter: Reporter, watch: Stopwatch, iteration: int, config: RunConfig
) -> Callable[[str], AbstractContextManager[None]]:
    # Exploring at the service goes on beside other phases; in a phase of its own it is only waited for.
    clocked = {"explore": "wait"} if config.explore.source == "service" else {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        reporter.phase(iteration, name)
        with watch.measure(clocked.get(name, name)):
            yield

    return phase


def _samples(session: Session, gathered: Gathered) -> TrainingSamples:
    made = gathered.made
    advantages = session.updater.algorithm.advantages(made.scores)
    guidance = session.config.guidance
    rows = [session.backbone.conditioning(kept.prompt.text, guidance) for kept in gathered.kept]
    prompts = torch.arange(len(rows)).repeat_interleave(made.scores.shape[1])
    return TrainingSamples(made.latents.flatten(0, 1), advantages.flatten(), stack(rows), prompts)


def _line(
    iteration: int, gathered: Gathered, pushed: bytes, update: UpdateFigures, watch: Stopwatch, config: RunConfig
) -> dict[str, Any]:
    half, made = config.explore.keep // 2, gathered.made
    return {
        "iteration": iteration,
        "version": iteration + 1,
        "proxy_mean": gathered.proxy_mean,
        "reward_best": float(made.scores[:, :half].mean()),
        "reward_worst": float(made.scores[:, half:].mean()),
        "rewards": {name: float(values.mean()) for name, values in made.rewards.items()},
        "explored_version": gathered.version,
        "precision": gathered.precision,
        "numerics": gathered.numerics,
        "digest": adapter_digest(pushed),
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "grad_norm_max": update.grad_norm_max,
        **{f"objective/{name}": value for name, value in update.figures.items()},
        "seconds": dict(watch.seconds),
    }


def _evaluate(session: Session, metrics: Metrics, reporter: Reporter, version: int) -> Evaluation:
    """Held-out prompts under the averaged weights; version 0 is the base."""
    settings = session.config.evaluate
    reporter.phase(version, "evaluate")
    average = session.policy.adapter(session.policy.averaged)
    session.generator.set_adapter(average if version else None)
    result = evaluate(
        session.generator,
        session.rewards,
        session.test_prompts,
        seeds=settings.seeds,
        steps=settings.steps,
        solver=session.config.solver,
        guidance=session.config.guidance,
    )
    means = {name: result.mean(name) for name in result.scores}
    if not any(line["version"] == version for line in metrics.lines("evaluation")):
        metrics.log("evaluation", version=version, rewards=means)
    reporter.note(f"held out, version {version}: " + ", ".join(f"{k} {v:.4f}" for k, v in means.items()))
    return result


def _measure_fidelity(session: Session, pushed: bytes, version: int, metrics: Metrics, reporter: Reporter) -> None:
    """Rank correlation of the service's proxy with BF16 rewards, over whole groups of held-out prompts."""
    config, explorer = session.config, session.explorer
    merge(session.generator, pushed)
    prompts = session.test_prompts[: config.evaluate.fidelity_prompts]
    if explorer is None or not prompts or version:
        return
    reporter.phase(version, "fidelity")
    answer = explorer.explore(prompts, version, seed_root(config, -1), whole=True)
    groups = [Kept(p, list(g.seeds), torch.empty(0)) for p, g in zip(prompts, answer.groups, strict=True)]
    true = regenerate(groups, session.generator, session.rewards, config).scores
    proxy = torch.tensor([group.scores for group in answer.groups])
    fidelity = rank_fidelity(proxy, true, config.explore.keep)
    if not math.isfinite(fidelity.spearman):
        reporter.note("the rewards of a whole group are equal: no rank correlation can be given")
        return
    metrics.log("fidelity", version=version, prompts=len(prompts), **vars(fidelity))
    reporter.note(
        f"{answer.precision} at {config.explore.steps} steps against BF16 at {config.regenerate.steps}: "
        f"Spearman {fidelity.spearman:.3f} over {len(prompts)} groups of {proxy.shape[1]}"
    )
