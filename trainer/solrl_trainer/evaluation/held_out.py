"""Measurements on held-out prompts: rewards of the averaged weights, and rank fidelity of exploration."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from solrl_core.errors import FidelityError
from solrl_core.fidelity import Fidelity, rank_fidelity
from solrl_core.image_files import small_images
from solrl_engine.sampler import Sampler
from solrl_proto.rollouts import Plan, PromptItem

from solrl_trainer.evaluation.evaluate import evaluate
from solrl_trainer.evaluation.gallery import LARGEST_SIDE
from solrl_trainer.evaluation.stopping import clear_fall, held_out_scores, reason_to_stop, scores_without_fallen_guard
from solrl_trainer.prompts.prompt_rewards import weights_per_prompt
from solrl_trainer.ranks.communicator import gather_rows, gather_values, shard
from solrl_trainer.records.evaluations import Evaluation
from solrl_trainer.records.records import HeldOutRecord
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.rollouts.exploration import seed_root
from solrl_trainer.rollouts.groups import CandidateGroup, batched, flattened
from solrl_trainer.run_folder import checkpoints
from solrl_trainer.run_folder.checkpoints import best_kept
from solrl_trainer.run_folder.figures import LEAST_FIDELITY, ended_text
from solrl_trainer.run_folder.output_files import replace_file
from solrl_trainer.session import Session
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)

BASE_EVALUATION = "base_evaluation.safetensors"
"""File of the base's evaluation in a run's folder; a resumed run does not repeat it."""


def evaluate_average(
    session: Session, log: RunLog, version: int, base: Evaluation | None = None, *, curve: bool = False
) -> Evaluation:
    """Evaluate the averaged weights of a version, against the evaluation of version 0, the `base`, unless this is it.

    With `curve`, only the prompts and seeds of the held-out curve are evaluated.
    """
    config, settings, policy = session.config, session.config.evaluate, session.models.policy
    average = policy.average_adapter() if version else None
    prompts, seeds = (config.curve_prompts, config.curve_seeds) if curve else (settings.prompts, settings.seeds)
    with log.measuring(version, "evaluate"), session.models.serving(average) as generator:
        plan = Plan(steps=settings.steps, solver=config.solver, guidance=config.guidance)
        evaluation = evaluate(
            Sampler(generator, lambda: plan, batch=session.device.sampler.batch),
            session.device.image_scorer,
            session.test_prompts[:prompts],
            session.world,
            seeds=seeds,
            always=settings.rewards,
            encode=session.models.encoders.encode,
            progress=log.progress,
        )
    _log_evaluation(session, log, version, evaluation, base or evaluation)
    return evaluation


def _log_evaluation(session: Session, log: RunLog, version: int, evaluation: Evaluation, base: Evaluation) -> None:
    if session.world.rank == 0:
        config = session.config
        prompts = session.test_prompts[: config.curve_prompts]
        weights = weights_per_prompt(prompts, config.rewards)
        record = HeldOutRecord.of(version, base, evaluation, weights, config.curve_prompts, config.curve_seeds)
        log.evaluated(record, evaluation, [prompt.text for prompt in session.test_prompts[: len(evaluation.images)]])


def evaluate_base(session: Session, log: RunLog, *, resumed: bool) -> Evaluation:
    """Evaluate the base; a `resumed` run reads its evaluation if that has the same settings."""
    path, config = session.config.output / BASE_EVALUATION, session.config
    loaded = session.device.loaded
    settings = {
        "model": [config.model, config.revision, config.solver, config.guidance, session.models.backbone.device.type],
        "images": [config.evaluate.seeds, config.evaluate.steps, [prompt.id for prompt in session.test_prompts]],
        "parts": {name: value for name, value in loaded.parts.items() if not name.startswith("prompts:train")},
        "rewards": dict(zip(loaded.rewards.names, loaded.rewards.digests().values(), strict=True)),
    }
    stored = load_evaluation(path, settings) if resumed and session.world.rank == 0 else None
    if not gather_values(stored is not None, session.world)[0]:
        measured = evaluate_average(session, log, 0)
        if session.world.rank == 0:
            save_evaluation(path, measured, settings)
        return measured
    if stored is None:
        return Evaluation(scores={}, images=torch.empty(0))
    _log_evaluation(session, log, 0, stored, stored)
    return stored


def evaluate_along(session: Session, log: RunLog, version: int, base: Evaluation) -> None:
    """Evaluate a version for the held-out curve, if that is due and the log of a resumed run lacks it."""
    if not session.config.evaluate.is_due(version):
        return
    if not gather_values(log.is_evaluated(version), session.world)[0]:
        evaluate_average(session, log, version, base, curve=True)


def stopped_at(session: Session, log: RunLog, version: int) -> str | None:
    """Why the run ends at a version, see `reason_to_stop`; the same on all ranks."""
    reason: str | None = gather_values(reason_to_stop(log.evaluations(), session.config, version), session.world)[0]
    return reason


def take_best(session: Session, log: RunLog, reason: str, version: int) -> int:
    """Take the averaged weights of the best checkpoint of a run that ends after `version` iterations; return theirs.

    Best is the highest held-out reward where no guard has fallen, or the highest of all if one always has.
    """
    config, folder, lines = session.config, session.config.output / "checkpoints", log.evaluations()
    scores = held_out_scores(lines, config.weights)
    best = best_kept(folder, scores_without_fallen_guard(lines, config)) or best_kept(folder, scores)
    checkpoint = checkpoints.require(folder, best, session.world)
    session.models.policy.averaged = checkpoint.part("averaged")
    logger.info(f"the run {ended_text(reason, version, config.iterations, checkpoint.version)}")
    return checkpoint.version


def log_better_checkpoint(config: RunConfig, log: RunLog) -> None:
    """Say at the end of a run if its held-out reward is clearly below that of its best kept checkpoint."""
    lines = log.evaluations()
    best = best_kept(config.output / "checkpoints", held_out_scores(lines, config.weights))
    if best is not None and (fall := clear_fall(lines, config.weights, config.iterations, best)):
        logger.info(f"{fall}; the best weights: `solrl-train export {config.output} --checkpoint {best}`")


def measure_fidelity(session: Session, log: RunLog, version: int) -> None:
    """Measure rank fidelity before iteration `version`, if that is due, and refuse to go on with one below the floor.

    A resumed run measures versions that its log lacks, and the version where it stopped. Below
    `evaluate.fidelity_floor`, all ranks raise a FidelityError.
    """
    config, every = session.config, session.config.evaluate.fidelity_every
    prompts = session.fidelity_prompts
    due = version % every == 0 if every else version == 0
    if not session.measures_fidelity or not due:
        return
    earlier = log.spearman.get(version)
    if gather_values(earlier is not None and not below_floor(config, earlier, len(prompts)), session.world)[0]:
        return
    with log.measuring(version, "fidelity"):
        fidelity = _fidelity(session, prompts, version)
    if not math.isfinite(fidelity.spearman):
        logger.warning("rank fidelity cannot be measured: all rewards of each group are equal")
        return
    before = next(reversed(log.spearman.values()), math.inf)
    log.fidelity(version, len(prompts), vars(fidelity))
    explore = config.explore
    logger.info(
        f"version {version}, {_precision(session)} at {explore.steps} steps against BF16 at {config.sample_steps}: "
        f"Spearman {fidelity.spearman:.3f} over {len(prompts)} groups of {explore.candidates}"
    )
    if below_floor(config, fidelity.spearman, len(prompts)) and not fidelity.saturated:
        raise _floor_error(config, version, fidelity.spearman, len(prompts))
    if fidelity.spearman < LEAST_FIDELITY <= before and fidelity.saturated:
        logger.warning(
            f"reward saturated: rank fidelity is below {LEAST_FIDELITY:g}, because "
            f"{100 * fidelity.best_share:.0f} % of a prompt's candidates share its best score. Exploration reaches "
            f"{100 * fidelity.separation:.0f} % of the separation that such ties allow; take harder prompts, or a "
            "reward that tells good images apart"
        )
    elif fidelity.spearman < LEAST_FIDELITY <= before:
        cures = ["choose another explore.precision"]
        if config.two_stage and explore.sampler == "ode":
            cures += ["raise explore.steps", "let `solrl-train calibrate` choose a plan"]
        if explore.lag:
            cures.append("lower explore.lag")
        logger.warning(
            f"rank fidelity is below {LEAST_FIDELITY:g}, so exploration selects worse seeds; for a new run "
            f"{' or '.join(cures)}"
        )


def _precision(session: Session) -> str:
    """The precision of exploration; a service chooses what `auto` is."""
    precision = session.config.explore.precision
    return session.models.explorer.precision if precision == "auto" and not session.config.uses_service else precision


def below_floor(config: RunConfig, spearman: float, prompts: int) -> bool:
    """Whether a correlation is further below the floor than chance explains for this number of prompts."""
    floor = config.evaluate.fidelity_floor
    return floor > 0 and spearman + _chance(config, prompts) < floor


def _chance(config: RunConfig, prompts: int) -> float:
    """Half of a 90 % interval of the mean correlation of random orders."""
    return 1.64 / math.sqrt((config.explore.candidates - 1) * prompts)


def _floor_error(config: RunConfig, version: int, spearman: float, prompts: int) -> FidelityError:
    explore, floor = config.explore, config.evaluate.fidelity_floor
    return FidelityError(
        f"the run stops before iteration {version}, because its candidates rank almost at random",
        where="evaluate.fidelity_floor",
        got=f"Spearman {spearman:.2f} ± {_chance(config, prompts):.2f} of {explore.precision} at {explore.steps} steps "
        f"against BF16 at {config.sample_steps}",
        expected=f"at least {floor:g}",
        action=f"run `solrl-rollout check {config.model}`, and resume with another explore.precision or "
        "evaluate.fidelity_floor=0 to train nevertheless",
    )


def _fidelity(session: Session, prompts: Sequence[PromptItem], version: int) -> Fidelity:
    """Compare the scores of groups, explored as for iteration `version`, with their regenerated samples' scores.

    Prompts and seeds are the same at every version. Regeneration is under `version`, the merged behaviour policy.
    """
    config, world = session.config, session.world
    local = shard(prompts, world)
    proxy = true = torch.empty(0, config.explore.candidates)
    if local:
        session.models.encoders.encode([prompt.text for prompt in local], config.guidance)
        explored = max(0, version - config.lag)
        groups = session.source.groups_of(local, explored, seed_root(config.seed, -1), version)
        proxy = torch.tensor([group.scores for group in groups])
        per_batch = session.device.groups_per_batch(config.explore.candidates)
        true = torch.cat([_true_scores(session, part) for part in batched(groups, per_batch)])
    return rank_fidelity(gather_rows(proxy, world), gather_rows(true, world), config.explore.keep)


def _true_scores(session: Session, groups: Sequence[CandidateGroup]) -> torch.Tensor:
    """Scores [groups, N] of these groups' candidates as training samples in BF16, which are made together."""
    prompts, seeds = flattened([group.prompt for group in groups], [group.seeds for group in groups])
    samples = session.device.sampler.sample(prompts, seeds)
    return session.device.scorer.score_samples(prompts, samples)().scores.view(len(groups), -1)


_SETTINGS = "settings"
_IMAGES = "images"
_SCORES = "scores/"


def save_evaluation(path: Path, evaluation: Evaluation, settings: Mapping[str, Any]) -> None:
    """Write an evaluation, with its images as bytes, and all settings that it depends on, as JSON values."""
    tensors = {f"{_SCORES}{name}": values.contiguous() for name, values in evaluation.scores.items()}
    tensors[_IMAGES] = small_images(evaluation.images, LARGEST_SIDE)
    replace_file(path, save(tensors, {_SETTINGS: json.dumps(settings)}))


def load_evaluation(path: Path, settings: Mapping[str, Any]) -> Evaluation | None:
    """Read an evaluation, with images float32 in [0, 1]; None if there is none with exactly these settings."""
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get(_SETTINGS) != json.dumps(settings):
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError):
        return None
    scores = {name.removeprefix(_SCORES): values for name, values in tensors.items() if name.startswith(_SCORES)}
    order = [name for name in settings["rewards"] if name in scores]
    return Evaluation(scores={name: scores[name] for name in order}, images=tensors[_IMAGES].float() / 255)
