"""`solrl-train compare`: runs side by side, from their folders alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solrl_trainer.evaluation.ended import best_version
from solrl_trainer.run_folder.figures import duration_text, reward_label, reward_text, sum_text
from solrl_trainer.run_folder.folder import saved_settings
from solrl_trainer.run_folder.metrics_file import own_time, read_metrics
from solrl_trainer.settings.config import RunConfig

METRICS = "metrics.jsonl"


def compare(folders: Sequence[Path]) -> None:
    """Print a row for each run: iterations, time, and its held-out rewards, first and newest; a note if they differ.

    FileNotFoundError: a folder has no run, or its run no figures yet; ValueError: a file of a run is damaged.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    runs = [(folder, saved_settings(folder), _lines(folder)) for folder in folders]
    names = list(
        dict.fromkeys(name for _, _, lines in runs for line in _evaluations(lines) for name in line["rewards"])
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("run", "recipe", "trained on"):
        table.add_column(heading, overflow="fold")
    for heading in ("iterations", "time", *map(reward_label, names)):
        table.add_column(heading, justify="right", overflow="fold")
    for folder, config, lines in runs:
        iterations = [line for line in lines if line["event"] == "iteration"]
        seconds = sum(sum(own_time(line["seconds"]).values()) for line in iterations)
        begun = f"{len(iterations)} of {config.iterations}"
        cells = [_change(name, _evaluations(lines)) for name in names]
        recipe = config.preset.split("/")[1]
        table.add_row(str(folder), recipe, sum_text(config.shown_weights), begun, duration_text(seconds), *cells)
    Console(markup=False).print(table)
    if len({_judged_on(config) for _, config, _ in runs}) > 1:
        print("The runs are evaluated with other models, prompts, seeds or steps: their rewards are not comparable.")


def _lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; if the run took its best weights, no evaluation after theirs."""
    last = best_version(folder)
    lines = read_metrics(folder / METRICS)
    return [line for line in lines if last is None or line["event"] != "evaluation" or line["version"] <= last]


def _evaluations(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == "evaluation"]


def _change(name: str, evaluations: Sequence[dict[str, Any]]) -> str:
    """A reward before and at the newest evaluation that has it; a dash if none does."""
    values = [line["rewards"][name] for line in evaluations if name in line["rewards"]]
    return " → ".join(reward_text(name, value) for value in values[:1] + values[1:][-1:]) or "—"


def _judged_on(config: RunConfig) -> str:
    """What decides the images of an evaluation, beside the weights."""
    judge = config.evaluate
    prompts = {name: source.share for name, source in config.prompt_sources.items()}
    return repr((config.model, prompts, config.seed, config.guidance, judge.prompts, judge.seeds, judge.steps))
