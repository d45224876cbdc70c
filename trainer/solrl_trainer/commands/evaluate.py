"""`solrl-train evaluate`: compares a run's averaged weights with its base model, with any set of rewards."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from solrl_core.sampling.generator import Generator
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_proto.rollouts import Plan

from solrl_trainer.commands.preflight import is_usable, require_usable
from solrl_trainer.evaluation.ended import EVALUATION, GRID, best_version
from solrl_trainer.evaluation.evaluate import evaluate, shown_seed
from solrl_trainer.evaluation.gallery import Gallery, load_gallery, save_gallery
from solrl_trainer.policy.progress import OnProgress
from solrl_trainer.prompts.prompt_rewards import scored_prompts, weights_per_prompt
from solrl_trainer.prompts.prompt_sets import log_covered, prompts_of_run
from solrl_trainer.ranks.communicator import pick_device
from solrl_trainer.ranks.rank_runtime import SINGLE_PROCESS, RankRuntime
from solrl_trainer.records.evaluations import Evaluation, compare, verdicts
from solrl_trainer.records.waits import Waits
from solrl_trainer.report.grid import write_grid
from solrl_trainer.rollouts.loading import load_model
from solrl_trainer.rollouts.truncation_warnings import warn_of_long_prompts, warn_of_unread_prompts
from solrl_trainer.run_folder import checkpoints
from solrl_trainer.run_folder.figures import trained_text
from solrl_trainer.run_folder.folder import SETTINGS, saved_settings
from solrl_trainer.run_folder.output_files import write_file
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError, config_error, parse_override
from solrl_trainer.settings.token_places import warn_of_reward_tokens

logger = logging.getLogger(__name__)

CHANGEABLE = ("reward_options", "device", "generate.height", "generate.width", "generate.frames")
"""Settings of the run that `--set` may change for an evaluation."""


def evaluate_run(
    folder: Path,
    *,
    progress: OnProgress = lambda done, total: None,
    rewards: Sequence[str] = (),
    overrides: Sequence[str] = (),
    prompts: int | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    checkpoint: int | None = None,
    processes: RankRuntime = SINGLE_PROCESS,
) -> dict[str, Any]:
    """Evaluate a checkpoint of a run; writes evaluation/{evaluation.json, grid.png} to its folder.

    Args:
        progress: called with the share that is done of both evaluations.
        rewards: names of rewards, by default the run's.
        overrides: `key=value` with a key in `CHANGEABLE`; `reward_options` are merged by reward.
        prompts: number of prompts, instead of the run's.
        seeds: number of images per prompt, instead of the run's.
        steps: sampling steps, instead of the run's.
        checkpoint: version of the checkpoint, by default the run's result, or else the newest.
        processes: processes that share the prompts; all read the folder, and rank 0 writes.

    Returns:
        Content of evaluation.json.

    Raises:
        FileNotFoundError: the folder contains no run, or a run without a checkpoint.
        ConfigError: an invalid override or number.
        ValueError, OSError: model, reward or prompts cannot be loaded, a reward cannot score these prompts, or the
            checkpoint is damaged.
    """
    saved = saved_settings(folder)
    changes = dict(parse_override(override) for override in overrides)
    config = _changed(saved, changes, {"prompts": prompts, "seeds": seeds, "steps": steps})
    settings = config.evaluate
    test_prompts = prompts_of_run(config.prompt_sources, "test")
    held_out = test_prompts.sample(settings.prompts)
    chosen = changes.get("reward_options", {})
    options = saved.reward_options | chosen
    names = list(rewards)
    for name in names:
        require_usable(name, held_out, "test", options)
    if not rewards:
        of_run = dict.fromkeys((*config.rewards, *settings.rewards))
        names = [name for name in of_run if is_usable(name, scored_prompts(name, held_out, settings.rewards), options)]
        if not names:
            raise ValueError("none of the run's rewards can score the prompts; choose other rewards with --rewards")
    if processes.is_rank_zero:
        unchanged = {*names} - {*chosen}
        loaders = {name: loader for name, loader in saved.reward_options.items() if name in unchanged}
        warn_of_reward_tokens(loaders, str(folder / SETTINGS))
    world = processes.world(config.device, config.patience)
    # Rank 0's, because a run that still trains may write a newer one meanwhile.
    version = best_version(folder) if checkpoint is None else checkpoint
    stored = checkpoints.require(folder / "checkpoints", version, world)
    log_covered(test_prompts, settings.prompts, "evaluated")
    logger.info(f"loading {config.model}")
    device = pick_device(config.device, world)
    # Drop the run's options for other rewards; options given here must belong to a requested reward.
    options = {name: value for name, value in options.items() if name in names or name in chosen}
    loaded = load_model(config, device, names, options, Waits())
    warn_of_long_prompts(loaded.backbone, {"held-out": held_out})
    warn_of_unread_prompts(loaded.rewards, {"held-out": held_out})
    generator = Generator(loaded.backbone, "bf16")
    plan = Plan(steps=settings.steps, solver=config.solver, guidance=config.guidance)
    sampler = Sampler(generator, lambda: plan, batch=AdaptiveBatchSize(config.batch, on_exhausted=logger.warning))
    scorer = Scorer(loaded.rewards, AdaptiveBatchSize(config.batch, doing="scoring", on_exhausted=logger.warning))

    def look(name: str, earlier: int) -> Evaluation:
        result = evaluate(
            sampler,
            scorer,
            held_out,
            world,
            always=names if rewards else [name for name in names if name in settings.rewards],
            seeds=settings.seeds,
            progress=lambda done, total: progress(earlier + done / total, 2),
        )
        logger.info(f"{name}: " + ", ".join(f"{reward} {result.mean(reward):.4f}" for reward in result.scores))
        return result

    before = look("base", 0)
    generator.set_adapter(stored.averaged)
    after = look(f"version {stored.version}", 1)
    summary = {
        "model": config.model,
        "preset": config.preset,
        "run": config.run,
        "trained": config.shown_weights,
        "version": stored.version,
        "prompts": len(held_out),
        "seeds": settings.seeds,
        "steps": settings.steps,
        "rewards": compare(before, after, weights_per_prompt(held_out, config.rewards)),
    }
    if processes.is_rank_zero:
        output = folder / "evaluation"
        texts, images = [prompt.text for prompt in held_out], (before.images, after.images)
        drawn = list(map(shown_seed, held_out))
        output.mkdir(exist_ok=True)
        write_file(output / EVALUATION, json.dumps(summary, indent=1, allow_nan=False))
        save_gallery(output, Gallery(texts, *images, verdicts(before, after), seeds=drawn))
        title = f"{config.run}, version {stored.version}"
        about = trained_text(config.model, config.preset, config.shown_weights)
        write_grid(load_gallery(output), output / GRID, title, about)
    return summary


def _changed(config: RunConfig, changes: Mapping[str, Any], options: Mapping[str, int | None]) -> RunConfig:
    if unknown := sorted(changes.keys() - set(CHANGEABLE)):
        raise ConfigError(f"got --set {unknown[0]}=…; an evaluation can only set {', '.join(CHANGEABLE)}")
    changed = config.model_dump(mode="json")
    changed["evaluate"] |= {name: value for name, value in options.items() if value is not None}
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        (changed[section] if section else changed)[field] = value
    try:
        return RunConfig.model_validate(changed)
    except ValidationError as error:
        sources = dict.fromkeys(changes, "--set") | {f"evaluate.{name}": f"--{name}" for name in options}
        raise config_error(error, sources) from error
