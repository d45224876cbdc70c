"""Terminal display of the demo of words: the words of each version as they are read, and a table at the end."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from solrl_core.rewards.images import as_bytes
from solrl_core.rewards.ocr import Ocr, closeness, wanted_text
from solrl_core.tesseract import read_by_tesseract, reads_exactly

from solrl_trainer.evaluation.gallery import Gallery, load_gallery
from solrl_trainer.records.evaluations import Evaluation
from solrl_trainer.records.progress import RichReporter
from solrl_trainer.records.records import HeldOutRecord, IterationRecord
from solrl_trainer.run_folder.figures import READ_RIGHT, duration_text

_LABEL, _CELL, _SHARE = 10, 8, 12
"""Columns of a row's label, of a word and of the share of right words."""
_MOST = 8
"""Words of a row, where the terminal is wide enough."""

HANDICAP = (
    "mini-text could spell: its captions were garbled on purpose, so that reinforcement learning has something to "
    "mend. With guidance 3, Tesseract reads 79.5 % of the untrained model's words right."
)
"""What the gain must be seen beside; the figure is on the model's card."""
NEXT = (
    ("words of your own", "solrl-train run --preset mini-text/fast/ocr --set prompts=my_words"),
    (
        "a reward of your own",
        "solrl-train run --preset mini-sana/fast/clipscore --iterations 5 --set 'rewards={\"my_redness:redness\": 1}'",
    ),
)
"""What to try after the demo, and its command."""


class WordsReporter(RichReporter):
    """Progress of a run on words: after each version a row of the same held-out words, as RapidOCR reads them.

    `read` reads images uint8 [N, H, W, 3] of one word each instead.
    """

    announces = False

    def __init__(
        self,
        iterations: int,
        file: TextIO | None = None,
        *,
        read: Callable[[torch.Tensor], Sequence[str]] | None = None,
    ) -> None:
        super().__init__(iterations, file)
        room = (self._console.width - _LABEL - _SHARE) // _CELL
        self._words = max(1, min(_MOST, room))
        self._read = read or Ocr(line=True).read
        self._shows_words = False

    def evaluated(self, record: HeldOutRecord, evaluation: Evaluation, prompts: Sequence[str]) -> bool:
        """Show the first words as this version writes them, and the share of all that is right."""
        words = [wanted_text(prompt, {}) for prompt in prompts[: self._words]]
        if not self._shows_words:
            self._shows_words = True
            self._console.print(_row("asked", [Text(word, "bold") for word in words], "read right"), soft_wrap=True)
        images = as_bytes(evaluation.images[: len(words)])
        cells = [_cell(*pair) for pair in zip(words, self._read(images), strict=True)]
        share = f"{100 * record.rewards[READ_RIGHT].mean:.0f} % of {record.images}"
        label = f"{record.version} of {self._iterations}" if record.version else "untrained"
        self._console.print(_row(label, cells, share), soft_wrap=True)
        return True

    def finished(self, record: IterationRecord) -> None:
        """An iteration is complete; its row comes with its evaluation."""
        self._count(record)


def _row(label: str, cells: Sequence[Text], share: str) -> Text:
    row = Text(f"{label:<{_LABEL}}")
    for cell in cells:
        cell.pad_right(_CELL - cell.cell_len)
        row.append_text(cell)
    return row.append(f"{share:>{_SHARE}}")


def _cell(word: str, read: str) -> Text:
    """What was read, with a mark: right or wrong."""
    right, longest = closeness(read, word) == 1, _CELL - 3
    text = "".join(filter(str.isprintable, read)) or "–"
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return Text(f"{text} {'✓' if right else '✗'}", "green" if right else "red")


def show_words(result: dict[str, Any], folder: Path, seconds: float) -> None:
    """Print the share of words that are read right before and after, what the run wrote, and what to try next."""
    console = Console(markup=False, highlight=False)
    console.print(words_table(result, folder))
    if shutil.which("tesseract") is None:
        console.print("for an engine that no reward uses, install Tesseract: apt install tesseract-ocr", soft_wrap=True)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
    console.print(f"LoRA for diffusers: {folder / 'lora.safetensors'}", soft_wrap=True)
    console.print(f"the demo took {duration_text(seconds)}")
    for what, command in NEXT:
        console.print(f"next, {what}: {command}", soft_wrap=True)
    console.print(HANDICAP, soft_wrap=True)


def words_table(result: dict[str, Any], folder: Path) -> Table:
    """Share of the held-out words that RapidOCR and, where it is installed, Tesseract read right, before and after."""
    gallery = load_gallery(folder)
    table = Table(title="held-out words read right", title_style="bold", box=box.ROUNDED)
    table.add_column("by")
    for heading in ("words", "before", "after"):
        table.add_column(heading, justify="right", no_wrap=True)
    row = result["rewards"][READ_RIGHT]
    table.add_row(
        "RapidOCR, which gives the reward", str(result["images"]), *(_share(row[k]) for k in ("before", "after"))
    )
    if (read := by_tesseract(gallery)) is not None:
        table.add_row("Tesseract, which no reward uses", str(len(gallery.prompts)), *map(_share, read))
    return table


def by_tesseract(gallery: Gallery) -> tuple[float, float] | None:
    """Shares of a gallery's words that Tesseract reads right, before and after; None where it is not installed."""
    if shutil.which("tesseract") is None:
        return None
    words = [wanted_text(prompt, {}) for prompt in gallery.prompts]
    before, after = (
        sum(map(reads_exactly, read_by_tesseract(images.permute(0, 2, 3, 1).numpy()), words)) / len(words)
        for images in (gallery.before, gallery.after)
    )
    return before, after


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
