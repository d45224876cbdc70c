"""`solrl-train run`: a training with progress, result, gallery and report."""

import json
import logging
import os
import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from solrl_proto.models import ModelInfo

from solrl_trainer.commands.export import export
from solrl_trainer.evaluation.ended import GRID, RESULT
from solrl_trainer.evaluation.gallery import Gallery, load_gallery, save_gallery
from solrl_trainer.loop import Result, train
from solrl_trainer.ranks.rank_runtime import SINGLE_PROCESS, RankRuntime
from solrl_trainer.records.evaluations import compare, verdicts
from solrl_trainer.records.progress import RichReporter
from solrl_trainer.records.shown_log import TRAINER_LOG, shown_log
from solrl_trainer.records.trackers.run_trackers import open_trackers
from solrl_trainer.report.grid import write_grid
from solrl_trainer.report.page import write_report
from solrl_trainer.run_folder import resuming
from solrl_trainer.run_folder.figures import trained_text
from solrl_trainer.run_folder.folder import SETTINGS, check_new, saved_settings
from solrl_trainer.run_folder.output_files import write_file
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.settings_yaml import SETTINGS_YAML, settings_yaml

logger = logging.getLogger(__name__)

_NOT_SAVED = ("CUDA_VISIBLE_DEVICES", "SOLRL_TOKEN_PATH", "HF_TOKEN_PATH")
"""Variables of the environment that a run needs again: its folder has none of them."""


def run(
    config: RunConfig,
    *,
    resume: bool = False,
    version: int | None = None,
    allowed: Collection[str] = (),
    processes: RankRuntime = SINGLE_PROCESS,
    reporter: RichReporter | None = None,
    hosted: ModelInfo | None = None,
) -> dict[str, Any]:
    """Train, then write result.json, gallery, grid.png, lora.safetensors, README.md and report.html into the folder.

    lora.safetensors has the averaged weights, for `load_lora_weights` of the model's diffusers pipeline; README.md is
    its model card. They are of the last version, or of the best with evaluate.stop_after. The caller must have locked
    the folder.

    Args:
        resume: continue the run in the folder.
        version: of the checkpoint to continue from, instead of the newest.
        allowed: names of what may change when it is resumed, see `resuming.check`.
        processes: processes that train together, with this one as rank 0; by default it is alone.
        reporter: shows progress, instead of a `RichReporter`.
        hosted: the run's model at its service, from `check_run`.

    Returns:
        Content of result.json.
    """
    processes.broadcast_text(config.model_dump_json())
    world = processes.world(config.device, config.patience)
    config.output.mkdir(parents=True, exist_ok=True)
    if resume:
        # Refuse changes before the folder's settings are overwritten.
        resuming.check_before_loading(config, version, allowed)
    else:  # Python callers have had no preflight.
        check_new(config.output)
    write_file(config.output / SETTINGS, config.model_dump_json(indent=1))
    write_file(config.output / SETTINGS_YAML, settings_yaml(config))
    with (
        reporter or RichReporter(config.iterations) as progress,
        shown_log(progress.print, config.output / TRAINER_LOG),
        open_trackers(config) as trackers,
    ):
        result = train(
            config, progress, trackers, resume=resume, checkpoint=version, allowed=allowed, world=world, hosted=hosted
        )
        logger.info("writing the report")
        summary = summarize(config, result)
        write_file(config.output / RESULT, json.dumps(summary, indent=1, allow_nan=False))
        save_gallery(config.output, _gallery(result))
        gallery_grid(config.output)
        export(config, result.version)
        trackers.result(result.iterations, summary["rewards"])
        trackers.report(write_report(config.output))
    return summary


def follow(processes: RankRuntime, *, resume: bool, version: int | None) -> None:
    """Train as a rank other than 0, which gets its settings and writes nothing; `run` describes the arguments."""
    config = RunConfig.model_validate_json(processes.broadcast_text(None))
    processes.set_hint(resume_hint(config, processes))
    logging.getLogger("solrl_trainer").addHandler(logging.NullHandler())
    train(config, None, resume=resume, checkpoint=version, world=processes.world(config.device, config.patience))


def resume_hint(config: RunConfig, processes: RankRuntime) -> str:
    """The command that continues a run of as many processes, with variables of the environment that it needs again."""
    variables = [f"{name}={shlex.quote(os.environ[name])}" for name in _NOT_SAVED if name in os.environ]
    program = ["solrl-train"] if processes.rank_info.size == 1 else ["torchrun", "…", "-m", "solrl_trainer"]
    return f"continue with: {' '.join([*variables, *program])} {shlex.join(['run', '--resume', str(config.output)])}"


def summarize(config: RunConfig, result: Result) -> dict[str, Any]:
    """Figures of a finished run."""
    return {
        "model": config.model,
        "preset": config.preset,
        "run": config.run,
        "trained": config.shown_weights,
        "iterations": result.iterations,
        "planned": config.iterations,
        "version": result.version,
        "stopped": result.stopped,
        "prompts": len(result.prompts),
        "images": next(iter(result.before.scores.values())).numel(),
        "rewards": compare(result.before, result.after, result.weights),
        "spearman": next(iter(result.spearman.values()), None),
        "spearman_by_version": result.spearman,
        "seconds": result.seconds,
    }


def gallery_grid(folder: Path) -> Path:
    """Write grid.png from a run's gallery; a FileNotFoundError if the folder lacks it, or the run's settings."""
    config = saved_settings(folder)
    about = trained_text(config.model, config.preset, config.weights)
    return write_grid(load_gallery(folder), folder / GRID, config.run, about)


def _gallery(result: Result) -> Gallery:
    before, after, pairs = result.before, result.after, result.pairs
    gallery = Gallery(result.prompts, before.images, after.images, verdicts(before, after), seeds=result.seeds)
    if pairs is None:
        return gallery
    return replace(gallery, pairs=pairs.pairs, explored=pairs.explored, regenerated=pairs.regenerated)
