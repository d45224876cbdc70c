"""`solrl-train run`: a training with its progress, result, gallery and report."""

import json
from pathlib import Path
from typing import Any

import torch
from solrl_proto.rollouts import AdapterRef, Candidates, RolloutRequest

from solrl_trainer import checkpoints
from solrl_trainer.client import RolloutClient, rollout_token
from solrl_trainer.config import RunConfig
from solrl_trainer.evaluate import compare, verdicts
from solrl_trainer.explore import plan
from solrl_trainer.gallery import Pair, load_gallery, save_gallery
from solrl_trainer.grid import write_grid
from solrl_trainer.images import from_png
from solrl_trainer.loop import Result, train
from solrl_trainer.progress import RichReporter
from solrl_trainer.report import write_report

_SHOWN_PROMPTS = 3
_SHOWN_EACH = 3


def run(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train, then write result.json, gallery, grid.png and report.html into the run's folder.

    Returns:
        What result.json holds.
    """
    config.output.mkdir(parents=True, exist_ok=True)
    if resume:
        checkpoints.latest(config.output / "checkpoints", config)  # other settings are refused before theirs are lost
    elif (config.output / "checkpoints").exists():
        raise FileExistsError(
            f"{config.output} already holds a run; continue it with --resume, or choose another --output"
        )
    (config.output / "config.json").write_text(config.model_dump_json(indent=1))
    with RichReporter(config.iterations) as reporter:
        result = train(config, reporter, resume=resume)
        reporter.note("writing the report")
        summary = summarize(config, result)
        (config.output / "result.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
        _save_images(config, result)
        gallery_grid(config.output)
        write_report(config.output)
    return summary


def summarize(config: RunConfig, result: Result) -> dict[str, Any]:
    """The figures of a finished run."""
    return {
        "model": config.model,
        "preset": config.preset,
        "run": config.run,
        "iterations": config.iterations,
        "images": next(iter(result.before.scores.values())).numel(),
        "rewards": compare(result.before, result.after),
        "spearman": result.spearman,
        "seconds": result.seconds,
    }


def gallery_grid(folder: Path) -> Path:
    """Write grid.png from a run's gallery."""
    return write_grid(load_gallery(folder), folder / "grid.png")


def _save_images(config: RunConfig, result: Result) -> None:
    before, after = result.before, result.after
    pairs, explored, regenerated = _best_and_worst(config, result)
    save_gallery(
        config.output,
        prompts=result.prompts,
        before=before.images,
        after=after.images,
        marks=verdicts(before, after),
        pairs=pairs,
        explored=explored,
        regenerated=regenerated,
    )


def _best_and_worst(config: RunConfig, result: Result) -> tuple[list[Pair], torch.Tensor | None, torch.Tensor | None]:
    """Some kept seeds of the last iteration: what the service saw beside what was trained on."""
    gathered = result.gathered
    if gathered is None or config.explore.source != "service":
        return [], None, None
    pairs, explored, regenerated = [], [], []
    half = config.explore.keep // 2
    for group, images, true in zip(
        gathered.kept[:_SHOWN_PROMPTS], gathered.made.images, gathered.made.scores, strict=False
    ):
        each = min(_SHOWN_EACH, half)
        index = [*range(each), *range(len(group.seeds) - each, len(group.seeds))]
        with RolloutClient(config.rollout_url, token=rollout_token()) as client:
            answer = client.rollouts(
                RolloutRequest(
                    model=config.model_name,
                    adapter=AdapterRef(run=config.run, version=config.iterations - 1),
                    prompts=(group.prompt,),
                    candidates=Candidates(seeds=(tuple(group.seeds[i] for i in index),)),
                    plan=plan(config, whole=True),
                    rewards=config.trained,
                    images="png",
                )
            )
        explored += [from_png(image) for image in answer.groups[0].images or () if image is not None]
        regenerated.append(images[index])
        pairs += [
            Pair(
                prompt=group.prompt.text,
                seed=group.seeds[i],
                place="best" if i < half else "worst",
                proxy=float(group.proxy[i]),
                true=float(true[i]),
            )
            for i in index
        ]
    return pairs, torch.stack(explored), torch.cat(regenerated)
