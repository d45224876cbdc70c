"""The trackers of one run, fed from the lines of metrics.jsonl, which stays the source of all figures."""

import io
import json
import logging
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from solrl_core.image_files import tiled
from solrl_proto.identifiers import Message
from solrl_proto.text_files import read_json, read_text

from solrl_trainer.records.evaluations import small_images
from solrl_trainer.records.trackers.registry import TRACKERS
from solrl_trainer.records.trackers.tracker import TrackedRun, Tracker
from solrl_trainer.run_folder.folder import SAMPLES
from solrl_trainer.run_folder.output_files import replace_file, write_file
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)

KEYS = "trackers.json"
"""File in a run's folder: tracker → `Kept`."""
SHOWN_PROMPTS = 16
_COLUMNS = 4
_SIDE = 256
"""Larger images are scaled down to this side in pixels."""
_KEY_LETTERS = string.ascii_lowercase + string.digits
_NOT_FIGURES = ("event", "time", "version", "elapsed")
_FAILURES = (Exception, SystemExit)
"""A tracker's failures. Some end the program where they find no account."""


class Sheets:
    """Sheets of a run by version: `samples/VERSION.webp`, and the caption beside it as text."""

    def __init__(self, output: Path) -> None:
        """`output`: the run's folder."""
        self._folder = output / SAMPLES

    def keep(self, version: int, sheet: Image.Image, caption: str) -> None:
        """Write a version's sheet. Raises OSError as `writing`."""
        self._folder.mkdir(exist_ok=True)
        file = io.BytesIO()
        sheet.save(file, "WEBP", quality=90)
        write_file(self._folder / f"{version:06d}.txt", caption)
        write_file(self._folder / f"{version:06d}.webp", file.getvalue())

    def of(self, version: int) -> tuple[Image.Image, str] | None:
        """A version's sheet and caption; None if there is none that can be read."""
        path = self._folder / f"{version:06d}.webp"
        try:
            with Image.open(path, formats=("WEBP",)) as image:
                return image.convert("RGB"), read_text(path.with_suffix(".txt"))
        except (OSError, ValueError):
            return None

    def rewind(self, version: int) -> None:
        """Delete sheets beyond `version`, from which the run continues."""
        for path in self._folder.glob("[0-9]*.*"):
            if path.stem.isdigit() and int(path.stem) > version:
                path.unlink()


class Kept(Message):
    """A run at a tracker, as its folder remembers it.

    Attributes:
        lines: of metrics.jsonl that the tracker holds for certain, since it was closed with them; otherwise None.
        version: newest version among them.
    """

    key: str
    lines: int | None = None
    version: int = -1


class Trackers:
    """Trackers of a run, and the sample images for those that are opened later.

    One that fails is logged once and then left out.
    """

    def __init__(self, config: RunConfig) -> None:
        """`config` are the run's settings, with the names of the trackers."""
        self._config = config
        self._path = config.output / KEYS
        self._kept: dict[str, Kept] = {}
        self._open: dict[str, Tracker] = {}
        self._lines, self._version = 0, -1
        self._sheets = Sheets(config.output)

    def start(self, version: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Open the trackers for a run that continues from `version`, and tell each which of the `lines` it lacks.

        With the line of an evaluation come the images that were shown then.
        """
        self._sheets.rewind(version)
        if not self._config.track:
            return
        runs = read_json(self._path) if self._path.is_file() else {}
        self._kept = {name: Kept(**fields) for name, fields in runs.items()}
        self._lines, self._version = len(lines), max((_version(line) for line in lines), default=-1)
        for name in self._config.track:
            try:
                self._open[name] = self._opened(name, version, lines)
            except _FAILURES as error:
                logger.warning(failed(name, error))

    def _opened(self, name: str, version: int, lines: Sequence[Mapping[str, Any]]) -> Tracker:
        kind, run = TRACKERS.find(name), self._kept.get(name)
        if run is not None and (not kind.reopens() or run.lines is None or run.version > version):
            logger.warning(
                f"tracker {name}: a new run there gets all figures, since the former one cannot be continued"
            )
            run = None
        if run is None:
            run = Kept(key="".join(secrets.choice(_KEY_LETTERS) for _ in range(21)), lines=0)
        tracker = kind(TrackedRun(self._config.run, run.key, self._config.output, self._config.model_dump(mode="json")))
        self._keep(name, Kept(key=run.key))
        for line in lines[run.lines :]:
            tracker.figures(_version(line), figures(line))
            if line["event"] == "evaluation" and (sheet := self._sheets.of(_version(line))) is not None:
                tracker.images(_version(line), *sheet)
        return tracker

    def _keep(self, name: str, kept: Kept) -> None:
        self._kept[name] = kept
        replace_file(self._path, json.dumps({name: run.model_dump() for name, run in self._kept.items()}))

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl was written."""
        numbers, version = figures(line), _version(line)
        self._lines, self._version = self._lines + 1, max(self._version, version)
        self._each(lambda tracker: tracker.figures(version, numbers))

    def result(self, version: int, rewards: Mapping[str, Any]) -> None:
        """The run ended with these held-out gains, which result.json has."""
        numbers = figures({"event": "result", "rewards": rewards})
        self._each(lambda tracker: tracker.figures(version, numbers))

    def samples(self, version: int, prompts: Sequence[str], images: torch.Tensor) -> None:
        """Images or clips, in [0, 1], of the held-out prompts under a version; the first are shown, and kept."""
        if len(images):
            sheet = contact_sheet(images[:SHOWN_PROMPTS])
            caption = "\n".join(f"{i}. {prompt}" for i, prompt in enumerate(prompts[:SHOWN_PROMPTS], 1))
            try:
                self._sheets.keep(version, sheet, caption)
            except OSError as error:  # a run does not end because of pictures
                logger.warning(str(error))
            self._each(lambda tracker: tracker.images(version, sheet, caption))

    def report(self, page: Path) -> None:
        """The report was written."""
        self._each(lambda tracker: tracker.report(page))

    def close(self, *, failed: bool) -> None:
        """Close all; may wait for uploads. `failed`: the run ended by an error."""
        self._each(lambda tracker: tracker.close(failed=failed))
        for name in self._open:
            self._keep(name, self._kept[name].model_copy(update={"lines": self._lines, "version": self._version}))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                act(tracker)
            except _FAILURES as error:
                del self._open[name]
                logger.warning(failed(name, error))


def _version(line: Mapping[str, Any]) -> int:
    return int(line.get("version", 0))


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
