"""The training loop: explore, select, regenerate, score, train, decay, checkpoint, push."""

import math
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from solrl_core.adapter import adapter_digest, decode_adapter, encode_adapter
from solrl_core.families.base import stack
from solrl_core.fidelity import rank_fidelity
from solrl_core.lora import adapter_layout
from solrl_proto.problems import ProblemError

from solrl_trainer import checkpoints
from solrl_trainer.client import RolloutClient
from solrl_trainer.config import RunConfig
from solrl_trainer.evaluate import Evaluation, evaluate
from solrl_trainer.explore import Kept, Regenerated, keep, regenerate
from solrl_trainer.metrics import Metrics, Stopwatch
from solrl_trainer.objectives.nft import group_advantages
from solrl_trainer.policy import OLD
from solrl_trainer.prompts import prompts_of_iteration
from solrl_trainer.session import Session
from solrl_trainer.update import Samples, train_on


class Reporter(Protocol):
    """Shows progress to a person."""

    def phase(self, iteration: int, name: str) -> None:
        """A phase of an iteration begins."""

    def finished(self, line: dict[str, Any]) -> None:
        """An iteration is done; `line` is what metrics.jsonl got."""

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
    spearman: float | None
    kept: list[Kept]
    """The last iteration's selection."""
    regenerated: Regenerated | None


def train(config: RunConfig, reporter: Reporter, *, resume: bool = False) -> Result:
    """Run a whole training, or the rest of one.

    Raises:
        ProblemError: the service refuses, differs or is gone.
        FloatingPointError: a loss or gradient that is not finite.
    """
    metrics = Metrics(config.output / "metrics.jsonl")
    folder = config.output / "checkpoints"
    found = checkpoints.latest(folder, config) if resume else None
    total = Stopwatch()
    started = time.perf_counter()
    with RolloutClient(config.rollout_url) as client:
        reporter.note(f"loading {config.model} and comparing digests with {client.url}")
        session = Session.open(config, client)
        policy, explorer = session.policy, session.explorer

        version = 0
        if found is not None:
            checkpoints.restore(found, policy, session.optimizer)
            version = found.version
            reporter.note(f"continuing after {version} iterations")
        # A run that stopped before its first checkpoint leaves lines too.
        metrics.rewind(version if found is not None else -1)
        pushed = found.adapter if found is not None else encode_adapter(policy.adapter(policy.tensors(OLD)))
        serve(session, pushed)
        explorer.push(version, pushed)

        with total.measure("evaluate"):
            session.generator.set_adapter(None)
            before = _evaluation(session, metrics, reporter, 0)
            spearman = _fidelity(session, version, metrics, reporter)
        serve(session, pushed)

        kept: list[Kept] = []
        made: Regenerated | None = None
        for iteration in range(version, config.iterations):
            watch = Stopwatch()
            prompts = prompts_of_iteration(session.train_prompts, config.explore.prompts, config.seed, iteration)

            reporter.phase(iteration, "explore")
            with watch.measure("explore"):
                root = explorer.seed_root(iteration)
                try:
                    answer = explorer.explore(prompts, iteration, root)
                except ProblemError as error:
                    if error.problem.kind not in ("run-not-found", "version-not-found"):
                        raise
                    reporter.note("the service has lost this run's adapter; pushing it again")
                    explorer.push(iteration, pushed)
                    answer = explorer.explore(prompts, iteration, root)
                kept = keep(answer, prompts, config.explore.keep)

            reporter.phase(iteration, "regenerate")
            with watch.measure("regenerate"):
                made = regenerate(kept, session.generator, session.rewards, config)

            reporter.phase(iteration, "train")
            with watch.measure("train"):
                samples = _samples(session, kept, made)
                update = train_on(samples, policy, session.backbone, session.optimizer, config, iteration)
                objective = config.objective
                policy.decay_old(min(objective.decay_rate * (iteration + 1), objective.decay_max))
                policy.average(iteration, objective.ema)

            reporter.phase(iteration, "push")
            with watch.measure("push"):
                pushed = encode_adapter(policy.adapter(policy.tensors(OLD)))
                if (iteration + 1) % config.checkpoint_every == 0 or iteration + 1 == config.iterations:
                    checkpoints.save(folder, iteration + 1, pushed, policy, session.optimizer, config)
                explorer.push(iteration + 1, pushed)
                serve(session, pushed)

            line = {
                "iteration": iteration,
                "version": iteration + 1,
                "proxy_mean": sum(sum(g.scores) for g in answer.groups) / sum(len(g.scores) for g in answer.groups),
                "reward_best": float(made.rewards[:, : config.explore.keep // 2].mean()),
                "reward_worst": float(made.rewards[:, config.explore.keep // 2 :].mean()),
                "precision": answer.precision,
                "numerics": answer.numerics,
                "digest": adapter_digest(pushed),
                **update,
                "seconds": watch.seconds,
            }
            metrics.log("iteration", **line)
            reporter.finished(line)
            for phase, seconds in watch.seconds.items():
                total.seconds[phase] = total.seconds.get(phase, 0.0) + seconds
            every = config.evaluate.every
            if every and (iteration + 1) % every == 0 and iteration + 1 < config.iterations:
                with total.measure("evaluate"):
                    _evaluate_average(session, metrics, reporter, iteration + 1)
                serve(session, pushed)

        with total.measure("evaluate"):
            after = _evaluate_average(session, metrics, reporter, config.iterations)
    total.seconds["total"] = time.perf_counter() - started
    held_out = [prompt.text for prompt in session.test_prompts]
    return Result(held_out, before, after, total.seconds, spearman, kept, made)


def serve(session: Session, adapter: bytes) -> None:
    """Merge the adapter that the service serves, from the same bytes, into the local generator."""
    layout = adapter_layout(session.generator.transformer, session.backbone.lora_targets)
    session.generator.set_adapter(decode_adapter(adapter, layout))


def _samples(session: Session, kept: list[Kept], made: Regenerated) -> Samples:
    advantages = group_advantages(made.rewards, global_std=session.config.objective.global_std)
    rows = [session.generator.encode(k.prompt.text, session.config.guidance) for k in kept for _ in k.seeds]
    return Samples(made.latents.flatten(0, 1), stack(rows), advantages.flatten())


def _evaluate_average(session: Session, metrics: Metrics, reporter: Reporter, version: int) -> Evaluation:
    session.generator.set_adapter(session.policy.adapter(session.policy.averaged))
    return _evaluation(session, metrics, reporter, version)


def _evaluation(session: Session, metrics: Metrics, reporter: Reporter, version: int) -> Evaluation:
    settings = session.config.evaluate
    reporter.phase(version, "evaluate")
    result = evaluate(
        session.generator,
        session.rewards,
        session.test_prompts,
        seeds=settings.seeds,
        steps=settings.steps,
        guidance=session.config.guidance,
    )
    means = {name: result.mean(name) for name in result.scores}
    metrics.log("evaluation", version=version, rewards=means)
    reporter.note(f"held out, version {version}: " + ", ".join(f"{k} {v:.4f}" for k, v in means.items()))
    return result


def _fidelity(session: Session, version: int, metrics: Metrics, reporter: Reporter) -> float | None:
    """Spearman of the service's proxy rewards against BF16 rewards over whole groups of held-out prompts."""
    config = session.config
    prompts = session.test_prompts[: config.evaluate.fidelity_prompts]
    if not prompts or version:
        return None
    reporter.phase(version, "fidelity")
    answer = session.explorer.explore(prompts, version, session.explorer.seed_root(-1))
    true = [
        regenerate([Kept(p, list(g.seeds), torch.empty(0))], session.generator, session.rewards, config).rewards[0]
        for p, g in zip(prompts, answer.groups, strict=True)
    ]
    proxy = torch.tensor([group.scores for group in answer.groups])
    fidelity = rank_fidelity(proxy, torch.stack(true), config.explore.keep)
    if not math.isfinite(fidelity.spearman):
        reporter.note("the rewards of a whole group are equal: no rank correlation can be given")
        return None
    metrics.log("fidelity", version=version, prompts=len(prompts), **vars(fidelity))
    reporter.note(
        f"{answer.precision} at {config.explore.steps} steps against BF16 at {config.regenerate.steps}: "
        f"Spearman {fidelity.spearman:.3f} over {len(prompts)} groups of {proxy.shape[1]}"
    )
    return fidelity.spearman
