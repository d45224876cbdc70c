"""One run in a process of its own, started by `runner`: trains, or resumes, and writes the file of the finished run."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from demo_figures import processor
from solrl_trainer.commands.local_service import rollout_service
from solrl_trainer.evaluation.gallery import Gallery, load_gallery, save_gallery
from solrl_trainer.evaluation.held_out import BASE_EVALUATION
from solrl_trainer.loop import Result, train
from solrl_trainer.records.evaluations import verdicts, within_prompt_std
from solrl_trainer.records.progress import RichReporter
from solrl_trainer.report.grid import write_grid
from solrl_trainer.run_folder.figures import trained_text
from solrl_trainer.run_folder.folder import locked
from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.config import RunConfig

from paper.experiments import Experiment
from paper.finished import file_of, record, write_record
from paper.words import WORDS, save_images

MACHINE = "machine.txt"
GRID_ROWS = 4
SHOWN_SEED = 1
KEPT_FIGURES = ("version", "proxy_mean", "rewards", "loss", "grad_norm", "groups_without_spread", "seconds")


def main() -> None:
    """Do the run on the command line: FOLDER JOBS PRESET SEED SETTING…"""
    folder, jobs, preset, seed, *settings = sys.argv[1:]
    do(Experiment(preset, tuple(settings), int(seed)), Path(folder), int(jobs))


def do(experiment: Experiment, folder: Path, jobs: int = 1) -> None:
    """Train a run to its end, write its file, and delete its folder.

    Images before and after are kept, too: of runs on text, and a grid of those of the first seed.

    Args:
        experiment: the run.
        folder: folder of all runs; the run's own is `work/<name>` in it until it is finished.
        jobs: runs at a time, over all GPUs.

    Raises:
        ValueError: the run was begun on another machine.
    """
    work, here = folder / "work" / experiment.name, machine()
    config = experiment.config.model_copy(update={"output": work})
    # The base's evaluation is the same for every seed; it is refused by itself where its settings differ.
    base = folder / "base" / f"{Path(config.model).name}-{experiment.reward}.safetensors"
    with locked(work):
        require_machine(work, here)
        _copy(base, work / BASE_EVALUATION)
        with _served(config, work) as served, RichReporter(config.iterations) as reporter:
            stopped, result = None, None
            try:
                result = train(served, reporter, resume=True)
            except FloatingPointError as error:
                stopped = str(error)
        _copy(work / BASE_EVALUATION, base)
        path = file_of(experiment.name, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        if result is not None and experiment.reward == "ocr" and config.evaluate.every:
            save_images(result.before.images, result.after.images, path.with_suffix(f".{WORDS}"))
        elif result is not None and experiment.seed == SHOWN_SEED:
            _write_grid(config, result, path.with_suffix(".png"))
        measured = _scores(result) | _metrics(work / "metrics.jsonl")
        write_record(path, record(experiment, machine=here, jobs=jobs, config=config, stopped=stopped, **measured))
    shutil.rmtree(work)


def machine() -> str:
    """Device and torch, in words. Results of different machines are not mixed."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if torch.cuda.is_available() else processor()


def require_machine(work: Path, here: str) -> None:
    """Note the machine of a run that begins, and refuse to continue one of another machine."""
    note = work / MACHINE
    begun = note.read_text().strip() if note.is_file() else here
    if begun != here:
        raise ValueError(f"{work} was begun on {begun}; this is {here}: delete it, or continue it there")
    note.write_text(f"{here}\n")


@contextmanager
def _served(config: RunConfig, work: Path) -> Iterator[RunConfig]:
    """The settings with the address of a service, if the run needs one."""
    if not config.uses_service:
        yield config
        return
    with rollout_service(config.model, work / "service.log", rewards=tuple(config.weights)) as url:
        yield config.model_copy(update={"rollout_url": url})


def _copy(source: Path, target: Path) -> None:
    """Copy a file that other processes may read or write; nothing if it exists or has no source."""
    if source.is_file() and not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(source, partial)
        partial.replace(target)


def _scores(result: Result | None) -> dict[str, Any]:
    if result is None:
        return {"prompts": [], "before": {}, "after": {}, "within": {}}
    before, after = result.before.scores, result.after.scores
    return {
        "prompts": result.prompts,
        "before": {name: values.double().mean(1) for name, values in before.items()},
        "after": {name: values.double().mean(1) for name, values in after.items()},
        "within": {name: within_prompt_std(values) for name, values in before.items()},
    }


def _metrics(path: Path) -> dict[str, Any]:
    lines = read_metrics(path)

    def of(event: str) -> list[Mapping[str, Any]]:
        return [line for line in lines if line["event"] == event]

    return {
        "curve": [(line["version"], line["rewards"]) for line in of("evaluation")],
        "iterations": [{key: line[key] for key in KEPT_FIGURES if key in line} for line in of("iteration")],
        "fidelity": [
            {key: value for key, value in line.items() if key not in ("event", "time", "elapsed")}
            for line in of("fidelity")
        ],
    }


def _write_grid(config: RunConfig, result: Result, path: Path) -> None:
    before, after = result.before, result.after
    marks = verdicts(before, after)
    save_gallery(config.output, Gallery(result.prompts, before.images, after.images, marks, seeds=result.seeds))
    about = trained_text(config.model, config.preset, config.weights)
    write_grid(load_gallery(config.output), path, config.run, about, rows=GRID_ROWS)


if __name__ == "__main__":
    main()
