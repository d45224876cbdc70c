"""The trackers of one run. They get its new lines of metrics.jsonl, which has all figures."""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from solrl_core.image_files import small_images, tiled
from solrl_proto.text_files import read_text

from solrl_trainer.records.trackers.registry import TRACKERS
from solrl_trainer.records.trackers.tracker import TrackedRun, Tracker
from solrl_trainer.run_folder.output_files import write_file
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)

KEY = "tracker-key.txt"
"""File in a run's folder with the run's key at all trackers."""
SHOWN_PROMPTS = 16
_COLUMNS = 4
_SIDE = 256
"""Larger images are scaled down to this side in pixels."""
_NOT_FIGURES = ("event", "time", "version", "elapsed")
_FAILURES = (Exception, SystemExit)
"""A tracker's failures. Some end the program where they find no account."""


class Trackers:
    """Trackers of a run. One that fails is logged once and then left out."""

    def __init__(self, config: RunConfig) -> None:
        """`config` are the run's settings, with the names of the trackers."""
        self._config = config
        self._open: dict[str, Tracker] = {}

    def start(self, version: int, *, anew: bool) -> None:
        """Open the trackers for a run that continues from `version`, or begins: −1; `anew`, with a new key."""
        path = self._config.output / KEY
        if self._config.track and (anew or not path.is_file()):
            write_file(path, secrets.token_hex(8))
        for name in self._config.track:
            settings = self._config.model_dump(mode="json")
            run = TrackedRun(self._config.run, read_text(path), version, self._config.output, settings)
            try:
                self._open[name] = TRACKERS.find(name)(run)
            except _FAILURES as error:
                logger.warning(failed(name, error))

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl was written."""
        numbers = figures(line)
        self._for_all(lambda tracker: tracker.figures(line["version"], numbers))

    def result(self, version: int, rewards: Mapping[str, Any]) -> None:
        """The run ended with these held-out gains, which result.json has."""
        numbers = figures({"event": "result", "rewards": rewards})
        self._for_all(lambda tracker: tracker.figures(version, numbers))

    def samples(self, version: int, prompts: Sequence[str], images: torch.Tensor) -> None:
        """Images or clips, in [0, 1], of the held-out prompts under a version; the first are shown."""
        if len(images):
            sheet = contact_sheet(images[:SHOWN_PROMPTS])
            caption = "\n".join(f"{i}. {prompt}" for i, prompt in enumerate(prompts[:SHOWN_PROMPTS], 1))
            self._for_all(lambda tracker: tracker.images(version, sheet, caption))

    def report(self, page: Path) -> None:
        """The report was written."""
        self._for_all(lambda tracker: tracker.report(page))

    def close(self, *, failed: bool) -> None:
        """Close all; may wait for uploads. `failed`: the run ended by an error."""
        self._for_all(lambda tracker: tracker.close(failed=failed))

    def _for_all(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                act(tracker)
            except _FAILURES as error:
                del self._open[name]
                logger.warning(failed(name, error))


@contextmanager
def open_trackers(config: RunConfig) -> Iterator[Trackers]:
    """The trackers of a run, opened as it starts and closed at the end of the block."""
    trackers = Trackers(config)
    try:
        yield trackers
    except BaseException:
        trackers.close(failed=True)
        raise
    trackers.close(failed=False)


def failed(name: str, error: BaseException) -> str:
    """The line about a tracker that failed."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"tracker {name} gets no more of this run: {reason}; metrics.jsonl has all figures"


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a line of metrics.jsonl, by `event/key`, and `event/key/name` within a mapping."""
    numbers: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}/{key}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = value

    for key, value in line.items():
        if key not in _NOT_FIGURES:
            add(f"{line['event']}/{key}", value)
    return numbers


def contact_sheet(images: torch.Tensor) -> Image.Image:
    """Images in [0, 1], or four frames of each clip, in rows of four, at most 256 px a side each."""
    images = small_images(tiled(images, columns=2), _SIDE)
    count, _, height, width = images.shape
    columns = min(count, _COLUMNS)
    sheet = Image.new("RGB", (columns * width, -(-count // columns) * height), "white")
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        sheet.paste(Image.fromarray(image.permute(1, 2, 0).numpy()), (column * width, row * height))
    return sheet
