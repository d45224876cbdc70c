"""The training loop: explore, select, regenerate, score, advantages, update, decay and average, checkpoint, push."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from solrl_core.adapter import encode_adapter
from solrl_core.families.backbone import stack
from solrl_engine.side_stream import Pending, in_thread
from solrl_proto.adapters import adapter_digest
from solrl_proto.models import ModelInfo

from solrl_trainer.algorithms.algorithm import advantages_of, aggregated, normalised
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.evaluation.ended import remove_results_after
from solrl_trainer.evaluation.evaluate import shown_seed
from solrl_trainer.evaluation.held_out import (
    evaluate_along,
    evaluate_average,
    evaluate_base,
    log_better_checkpoint,
    measure_fidelity,
    stopped_at,
    take_best,
)
from solrl_trainer.evaluation.stopping import held_out_scores, reason_to_stop
from solrl_trainer.policy.start_lora import read_start
from solrl_trainer.policy.update import UpdateFigures
from solrl_trainer.prompts.prompt_rewards import mean_weights, weights_per_prompt
from solrl_trainer.ranks.communicator import Communicator, require_equal, wait_for_rank_zero
from solrl_trainer.records.evaluations import Evaluation
from solrl_trainer.records.progress import RichReporter
from solrl_trainer.records.records import IterationRecord, share_without_spread, spread_of
from solrl_trainer.records.reward_shares import log_shares, reward_shares
from solrl_trainer.records.run_log import RunLog, open_run_log
from solrl_trainer.records.trackers.run_trackers import Trackers
from solrl_trainer.rollouts.exploration import ExplorationSummary, IterationSamples
from solrl_trainer.rollouts.groups import CandidateGroup, ScoredSamples, batched, best_and_worst
from solrl_trainer.rollouts.image_comparisons import SHOWN_EACH, SHOWN_PROMPTS, ImageComparisons, compare_images
from solrl_trainer.rollouts.selection import select
from solrl_trainer.run_folder import checkpoints, resuming
from solrl_trainer.run_folder.resuming import Change
from solrl_trainer.service.service_source import ServiceSource
from solrl_trainer.session import Session, open_session
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)


@dataclass
class Result:
    """The outcome of a run.

    Attributes:
        seeds: of each held-out prompt's image in the evaluations.
        before, after: evaluations of the base and of the averaged weights; if `before` was read, only rank 0 has it.
        weights: trained reward → its weight for these prompts, see `weights_per_prompt`.
        seconds: by phase and in total, also before a resume. Exploration at the service is concurrent with the
            other phases; "wait" is the part that the trainer waited for.
        spearman: rank fidelity of exploration by version, where it was measured; only on rank 0.
        version: of the averaged weights that `after` is of.
        stopped: why the run ended early, or takes weights of an older version than its last; None if neither.
        samples: of the last iteration, if this process trained one.
        pairs: explored and regenerated images of some of its selected seeds, on rank 0; None without regeneration.
    """

    prompts: list[str]
    seeds: list[int]
    before: Evaluation
    after: Evaluation
    weights: Mapping[str, float | torch.Tensor]
    seconds: dict[str, float]
    spearman: dict[int, float]
    iterations: int
    version: int
    stopped: str | None
    samples: IterationSamples | None
    pairs: ImageComparisons | None = None


def train(
    config: RunConfig,
    reporter: RichReporter | None,
    trackers: Trackers | None = None,
    *,
    resume: bool = False,
    checkpoint: int | None = None,
    allowed: Collection[str] = (),
    world: Communicator | None = None,
    hosted: ModelInfo | None = None,
) -> Result:
    """Run a training; with `resume`, continue from the newest checkpoint, or from that of version `checkpoint`.

    Later checkpoints are deleted. By default there is one rank; `reporter`, `trackers`, `allowed` (see
    `resuming.check`) and `hosted` (see `run`) are only on rank 0, which alone writes, reports and pushes.

    Raises:
        ProblemError: the service refuses a request or cannot be reached.
        MismatchError: the service would generate or score different images.
        ValueError: the run cannot be resumed with these settings, prompts, model, rewards or libraries.
        FloatingPointError: a loss or gradient that is not finite.
    """
    world = world or Communicator()
    stored = checkpoints.latest(config.output / "checkpoints", checkpoint, world) if resume else None
    with (
        open_run_log(config, reporter, world, trackers) as log,
        open_session(config, world, log.waiting, hosted) as session,
    ):
        models, version, changes = session.models, 0, list[Change]()
        if isinstance(session.source, ServiceSource):
            log.requests = session.source.requests
        if stored is not None:
            if world.rank == 0:
                changes = resuming.check(stored, config, session.device.loaded.parts, allowed)
            checkpoints.restore(stored, models.policy, session.updater.optimizer)
            version = stored.version
            logger.info(f"continuing after {version} iterations")
        elif config.start_lora is not None:
            policy = models.policy
            weights, summary = read_start(config.start_lora, models.backbone, policy.average_adapter())
            policy.start_from(weights)
            logger.info(summary)
        session.adapters = dict(stored.adapters) if stored else {0: encode_adapter(models.policy.behaviour())}
        # The digests in metrics.jsonl identify this run's versions at the service. Read them before dropping lines
        # beyond the checkpoint; a run that stopped before its first checkpoint leaves lines, too.
        session.source.start(session.adapters, log.pushed_digests() if resume else set())
        log.rewind(version if stored else -1, back=checkpoint is not None)
        log.changed(version, changes)
        if resume and world.rank == 0:
            checkpoints.drop_after(config.output / "checkpoints", version)
            continues = not reason_to_stop(log.evaluations(), config, version)
            remove_results_after(config.output, version, continues=continues)

        before = evaluate_base(session, log, resumed=resume)
        samples = None
        pictures: Pending[ImageComparisons | None] | None = None
        stopped, trained = None, config.iterations
        for iteration in range(version, config.iterations):
            evaluate_along(session, log, iteration, before)
            if (stopped := stopped_at(session, log, iteration)) is not None:
                trained = iteration
                log.ended(stopped)
                break
            samples = pictures = None  # frees the previous iteration's
            measure_fidelity(session, log, iteration)
            samples = collect_samples(session, log, iteration)
            if iteration == version and config.explore.source == "model":
                log_shares(_shares(config, samples))
            pictures = begin_comparisons(session, log, iteration, samples)
            train_step(session, log, iteration, samples)
        best = trained
        if stopped is None:
            after = evaluate_average(session, log, trained, before)
            stopped = stopped_at(session, log, trained)
        if stopped is not None:
            best = take_best(session, log, stopped, trained)
            after = evaluate_average(session, log, best, before)
        pairs = pictures() if pictures else None
        if stopped is None:
            log_better_checkpoint(config, log)
        return Result(
            prompts=[prompt.text for prompt in session.test_prompts],
            seeds=[shown_seed(prompt) for prompt in session.test_prompts],
            before=before,
            after=after,
            weights=weights_per_prompt(session.test_prompts, config.rewards),
            seconds=log.seconds(),
            spearman=log.spearman,
            iterations=trained,
            version=best,
            stopped=stopped,
            samples=samples,
            pairs=pairs,
        )


def collect_samples(session: Session, log: RunLog, iteration: int) -> IterationSamples:
    """Explore, select, regenerate and score an iteration's samples, and gather all ranks' samples.

    A GPU regenerates small groups together, and scores them while it generates the next.
    """
    config, clock = session.config, session.device.clock
    explore = config.explore
    prompts = session.train_prompts.of_iteration(explore.prompts, config.seed, iteration)
    local = session.device.own_prompts(iteration)
    session.models.encoders.encode([prompt.text for prompt in prompts], config.guidance)
    clock.restart()
    summaries: list[ExplorationSummary] = []
    arriving = session.source.explore(iteration, summaries.append)
    begun: list[tuple[list[CandidateGroup], Pending[ScoredSamples]]] = []
    explored = 0
    for part in batched(log.candidates(iteration, arriving), session.device.groups_per_batch(explore.keep)):
        explored += len(part)
        done = round(explore.prompts * explored / len(local))  # the other ranks are taken to be as far
        log.counted(iteration, "explored", done * explore.candidates, explore.prompts * explore.candidates)
        selections = [select(group, explore) for group in part]
        with log.phase(iteration, "regenerate"):
            begun.append((selections, session.device.regenerate(selections)))
        if config.two_stage:
            log.counted(iteration, "regenerated", done * explore.keep, explore.prompts * explore.keep)
    groups = []
    for selections, scored in begun:
        with log.phase(iteration, "regenerate"):
            for selection, regenerated in zip(selections, scored().split(len(selections)), strict=True):
                images = best_and_worst(regenerated.images, SHOWN_EACH)
                groups.append(replace(selection, samples=replace(regenerated, images=images)))
    (summary,) = summaries
    clock.add("candidates", "service", summary.times)
    samples = IterationSamples.gather(prompts, groups, summary, session.world)
    log.samples_ready(iteration, samples)
    return samples


def train_step(session: Session, log: RunLog, iteration: int, samples: IterationSamples) -> None:
    """Train on an iteration's samples, and push the next version of the behaviour policy."""
    config, models = session.config, session.models
    values = samples.scores
    if config.explore.source == "model":  # stored images have no rewards
        values = aggregated(config.algorithm, samples.rewards, weights_per_prompt(samples.prompts, config.rewards))
    with log.phase(iteration, "train"):
        total, algorithm = samples.scores.numel(), session.updater.algorithm
        update = session.updater.update(
            training_samples(session, samples, advantages_of(algorithm, values)),
            iteration,
            lambda done, every: log.counted(iteration, "trained", int(total * done / every), total),
        )
        models.policy.decay_and_average(iteration, config.policy)
        adapter = encode_adapter(models.policy.behaviour())
    digest = adapter_digest(adapter)
    require_equal(f"the adapter after iteration {iteration}", digest, session.world)

    # First the line, then the checkpoint, then the push: a run that is interrupted anywhere and resumed neither loses a
    # line nor pushes different bytes under the same version.
    record = _record(session, log, iteration, samples, values, update, digest)
    log.iteration_trained(record)
    session.checkpoint(iteration + 1, adapter, held_out_scores(log.evaluations(), config.weights))
    with log.phase(iteration, "push"):
        session.source.push(iteration + 1, adapter)
    log.iteration_finished(replace(record, seconds={**record.seconds, "push": log.elapsed("push")}))


def begin_comparisons(
    session: Session, log: RunLog, iteration: int, samples: IterationSamples
) -> Pending[ImageComparisons | None]:
    """Collect explored and regenerated images of some selected seeds for the report, if the run ends here.

    A service makes the last iteration's images while training goes on. All other images are made when the result is
    asked for. Without a service, this device makes them under the explored version.
    """
    models, adapter = session.models, session.adapters[iteration]

    def collect() -> ImageComparisons | None:
        pairs = None
        if session.world.rank == 0 and session.config.two_stage:
            try:
                pairs = compare_images(samples, session.source.images_of, prompts=SHOWN_PROMPTS, per_end=SHOWN_EACH)
            except Exception as error:  # a training must not fail because of images for its report
                logger.warning(f"the report does not show explored and regenerated images: {error}")
        log.comparisons_ready(iteration, samples, pairs)
        return pairs

    def return_and_collect() -> ImageComparisons | None:
        if session.config.two_stage:
            models.merge_behaviour(adapter, iteration)
        pairs = collect()
        wait_for_rank_zero(session.world)
        return pairs

    if not session.config.uses_service:
        return return_and_collect
    return in_thread(collect, "solrl-pairs").result if iteration + 1 == session.config.iterations else collect


def training_samples(session: Session, samples: IterationSamples, advantages: torch.Tensor) -> TrainingSamples:
    """The samples of all groups with their advantages [groups, kept], for the update."""
    groups, kept = samples.scores.shape
    backbone, guidance = session.models.backbone, session.config.guidance
    texts = [prompt.text for prompt in samples.prompts]
    session.models.encoders.encode(texts, guidance)  # Other ranks' prompts are not cached here yet.
    return TrainingSamples(
        latents=samples.latents.flatten(0, 1),
        advantages=advantages.flatten(),
        conditioning=stack([backbone.conditioning(text, guidance) for text in texts]),
        prompts=torch.arange(groups).repeat_interleave(kept),
        recording=samples.recording,
    )


def _shares(config: RunConfig, samples: IterationSamples) -> dict[str, float]:
    """Each trained reward's share in the spread of what advantages are computed of."""
    rewards = samples.rewards
    if config.algorithm.aggregation == "gdpo":
        rewards = {name: normalised(values.nan_to_num()) for name, values in rewards.items()}
    return reward_shares(rewards, weights_per_prompt(samples.prompts, config.rewards))


def _record(
    session: Session,
    log: RunLog,
    iteration: int,
    samples: IterationSamples,
    values: torch.Tensor,
    update: UpdateFigures,
    digest: str,
) -> IterationRecord:
    exploration, config = samples.exploration, session.config
    seconds = {
        "explore": exploration.seconds,
        "explore_here": exploration.seconds_here,
        "wait": log.elapsed("wait") - (exploration.seconds_here or 0.0) if config.uses_service else None,
        "regenerate": log.elapsed("regenerate") if config.two_stage else None,
        "train": log.elapsed("train"),
    }
    # Each reward's values in the groups that have it.
    rewards = {name: scores[~scores.isnan().any(1)] for name, scores in samples.rewards.items()}
    return IterationRecord(
        iteration=iteration,
        explored_version=exploration.version,
        precision=exploration.precision,
        numerics=exploration.numerics,
        proxy_mean=samples.proxy_mean,
        spearman=log.spearman.get(iteration),
        score=spread_of(samples.scores),
        without_spread=share_without_spread(values),
        rewards={name: spread_of(scores) for name, scores in rewards.items() if len(scores)},
        shares=_shares(config, samples),
        weights=mean_weights(samples.prompts, config.rewards),
        digest=digest,
        update=update,
        seconds={name: value for name, value in seconds.items() if value is not None},
        scoring=session.device.clock.times,
    )
