"""Progress of a run in the terminal, and the table at its end."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from solrl_client.retries import Wait

from solrl_trainer.records.evaluations import Evaluation
from solrl_trainer.records.records import HeldOutRecord, IterationRecord
from solrl_trainer.records.time_left import LiveLine, TimeLeft
from solrl_trainer.records.waits import Waits
from solrl_trainer.run_folder.figures import (
    EVALUATION_ONLY,
    duration_text,
    few_prompts_text,
    gain_text,
    hacked_text,
    interval_text,
    result_end,
    reward_label,
    reward_text,
    role_text,
    trained_text,
)

_TIMES = {"explore": 9, "wait": 8, "regenerate": 12, "train": 9, "push": 8}
"""Column → width. Exploration at a service is concurrent; "wait" is the part that the trainer waited for."""
_HEADER_EVERY = 20
_LABELS = {"evaluate": "evaluating held-out prompts", "fidelity": "measuring how well the proxy ranks"}
_LIVE_LABELS = {"evaluate": "evaluating", "fidelity": "ranking"}
"""Shorter, because the live line has no more room than the terminal."""
_COUNTED_IN = {"explored": "explore", "regenerated": "regenerate", "trained": "train"}
"""Count → the phase that raises it."""


class _Remaining(ProgressColumn):
    """Progress within a phase; otherwise a countdown to the end of the run, by the mean time of an iteration."""

    def render(self, task: Task) -> Text:
        text, ends = task.fields["within"], task.fields["ends"]
        if not text:
            text = "estimating" if ends is None else f"{duration_text(max(0, round(ends - time.monotonic())))} left"
        return Text(text, style="progress.remaining")


class RichReporter(LiveLine):
    """Progress of a run on stderr: a live line in a terminal, plain lines elsewhere."""

    announces = True
    """Whether plain lines say what is measured."""

    def __init__(self, iterations: int, file: TextIO | None = None) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("iteration {task.fields[current]} of {task.total:.0f}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[phase]}", style="bold", markup=False),
            TimeElapsedColumn(),
            _Remaining(),
            file=file,
        )
        self._iterations = iterations
        self._printed = 0
        self._began: tuple[int, float] | None = None
        self._phase, self._phase_left = "", TimeLeft()
        self._counts: dict[str, str] = {}
        self._counted, self._counts_left = -1, TimeLeft()
        self._waits = Waits()
        self._fields: dict[str, Any] = {"phase": "starting", "within": ""}
        self._task = self._progress.add_task("run", total=iterations, current=0, ends=None, **self._fields)

    def phase(self, iteration: int, name: str) -> None:
        self._phase, self._phase_left = name, TimeLeft()
        if name == "explore" and self._began is None:
            self._began = (iteration, time.monotonic())
        current = min(iteration + 1, self._iterations) if name in _TIMES else iteration
        label = " ".join(filter(None, (_LIVE_LABELS.get(name, name), self._counts_of(iteration).get(name))))
        self._progress.update(self._task, completed=iteration, current=current)
        self._show(phase=label, within="")
        if self.announces and not self._is_live and name in _LABELS:
            self.print(f"{_LABELS[name]} (version {iteration})")

    def progress(self, done: float, total: float) -> None:
        """Show `done` of `total` of the phase's work."""
        time_left = self._phase_left
        self._show(within=time_left.text(done, total, brief=True))
        if not self._is_live and time_left.line_is_due():
            self.print(f"{_LABELS.get(self._phase, self._phase)}: {time_left.text(done, total)}")

    def counted(self, iteration: int, part: str, done: int, total: int) -> None:
        """So many candidates of an iteration are explored, regenerated or trained."""
        counts, phase = self._counts_of(iteration), _COUNTED_IN[part]
        counts[phase] = f"{done}/{total}"
        if self._phase == phase:
            self._show(phase=f"{phase} {counts[phase]}")
        if not self._is_live and self._counts_left.line_is_due():
            parts = ", ".join(f"{name} {counts[at]}" for name, at in _COUNTED_IN.items() if at in counts)
            self.print(f"iteration {iteration + 1} of {self._iterations}: {parts}")

    def _counts_of(self, iteration: int) -> dict[str, str]:
        """Counted candidates of this iteration by phase; another iteration's counts are forgotten."""
        if iteration != self._counted:
            self._counts, self._counted, self._counts_left = {}, iteration, TimeLeft()
        return self._counts

    def finished(self, record: IterationRecord) -> None:
        version, seconds, score = record.version, record.seconds, record.score
        # Stored images have no scores; what their algorithm measures takes the place.
        scores = {"proxy": record.proxy_mean, "best": score.best, "worst": score.worst}
        values = {**(scores if record.rewards else record.update.figures), "loss": record.update.loss}
        widths = _TIMES | {name: max(9, len(name) + 2) for name in values}
        if self._printed % _HEADER_EVERY == 0:
            names = "".join(f"{name:>{width}}" for name, width in widths.items())
            self.print(f"{'iteration':>9}{names}", style="dim")
        self._printed += 1
        columns = {name: f"{seconds.get(name, 0.0):.1f} s" for name in _TIMES}
        columns |= {name: f"{value:.4f}" for name, value in values.items()}
        cells = "".join(f"{columns[name]:>{width}}" for name, width in widths.items())
        self.print(f"{f'{version}/{self._iterations}':>9}{cells}")
        self._count(record)

    def _count(self, record: IterationRecord) -> None:
        version = record.version
        if self._began is not None:
            first, began = self._began
            pace = (time.monotonic() - began) / (version - first)
            ends = time.monotonic() + pace * (self._iterations - version)
            self._progress.update(self._task, completed=version, ends=ends)

    def evaluated(self, record: HeldOutRecord, evaluation: Evaluation, prompts: Sequence[str]) -> bool:
        """A version was evaluated on `prompts`; returns whether it is shown here. If not, it is logged."""
        return False

    def waiting(self, server: str, wait: Wait | None) -> None:
        """A server is waited for; None: no longer. Any thread."""
        self._waits(server, wait)
        self._show()

    def _show(self, **fields: str) -> None:
        """Change the live line. Whom the run waits for takes the place of its phase, unless it trains meanwhile."""
        self._fields |= fields
        line, awaited = self._fields, self._waits.now
        if awaited is not None and self._phase != "train":
            server, until = awaited
            line = {"phase": f"waiting for {server.partition('//')[2]}", "within": f"until {until:%H:%M:%S}"}
        self._progress.update(self._task, **line, refresh=True)


def show_result(result: dict[str, Any], folder: Path) -> None:
    """Print a finished run's figures, and where its report and its weights are."""
    console = Console(markup=False)
    console.print(result_table(result))
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
    console.print(f"LoRA for diffusers: {folder / 'lora.safetensors'}", soft_wrap=True)


def rewards_table(result: Mapping[str, Any]) -> Table:
    """Held-out rewards before and after, with the gain and its interval, from result.json or evaluation.json."""
    weights = result["trained"]
    rewards = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, caption_justify="left")
    cautions = (few_prompts_text(result["prompts"]), hacked_text(result["rewards"], weights))
    if caption := "\n".join(filter(None, cautions)):
        rewards.caption = Text(caption, style="yellow")
    rewards.add_column("held-out reward", overflow="fold")
    for heading in ("before", "after", "gain", "95 % interval"):
        rewards.add_column(heading, justify="right", no_wrap=True)
    for name, row in result["rewards"].items():
        role = role_text(name, weights)
        style = "green" if row["low"] > 0 else "red" if row["high"] < 0 else ""
        rewards.add_row(
            Text.assemble(reward_label(name), (f"\n{role}" if role != EVALUATION_ONLY else "", "dim")),
            reward_text(name, row["before"]),
            reward_text(name, row["after"]),
            Text(gain_text(name, row["gain"]), style=style),
            interval_text(name, row["low"], row["high"]),
        )
    return rewards


def evaluation_table(evaluated: Mapping[str, Any]) -> Table:
    """The figures of a checkpoint, from evaluation.json."""
    table = rewards_table(evaluated)
    table.title = _title(evaluated, f"version {evaluated['version']}")
    return table


def result_table(result: dict[str, Any]) -> Table:
    """A finished run's figures, from result.json: held-out rewards, seconds by phase, rank correlation."""
    times = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    order = [*_TIMES, "evaluate", "total"]
    seconds = {phase: result["seconds"][phase] for phase in order if phase in result["seconds"]}
    for phase in seconds:
        times.add_column(f"{phase} s", justify="right", no_wrap=True)
    times.add_row(*(f"{value:.1f}" for value in seconds.values()))

    iterations = "1 iteration" if result["iterations"] == 1 else f"{result['iterations']} iterations"
    table = Table(title=_title(result, iterations), box=box.ROUNDED, show_header=False)
    table.add_column()
    table.add_row(rewards_table(result))
    table.add_section()
    table.add_row(times)
    if end := result_end(result):
        table.add_section()
        table.add_row(Text(f"The run {end}.", style="yellow"))
    if result["spearman"] is not None:
        table.add_section()
        table.add_row(f"Spearman of proxy against BF16 rewards within a prompt: {_spearman(result)}")
    return table


def _spearman(result: Mapping[str, Any]) -> str:
    """Rank fidelity, at the first and the last version where it was measured."""
    measured = list(result.get("spearman_by_version", {}).items())
    if len(measured) > 1:
        return ", ".join(f"{value:.3f} at version {version}" for version, value in (measured[0], measured[-1]))
    return f"{result['spearman']:.3f}"


def _title(result: Mapping[str, Any], what: str) -> Text:
    trained = trained_text(result["model"], result["preset"], result["trained"])
    return Text(f"{result['run']}: {trained}, {what}", style="table.title")
