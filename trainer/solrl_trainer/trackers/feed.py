"""The trackers of one run, fed from the lines of metrics.jsonl, which stays the source of all figures."""

import json
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from solrl_proto.text_files import read_json
from torch.nn.functional import interpolate

from solrl_trainer.config import RunConfig
from solrl_trainer.trackers.base import TrackedRun, Tracker
from solrl_trainer.trackers.registry import TRACKERS

KEYS = "trackers.json"
"""File in a run's folder: tracker → the run's key there."""
SHOWN_PROMPTS = 16
_COLUMNS = 4
_SIDE = 256
"""Larger images are scaled down to this side in pixels."""
_NOT_FIGURES = ("event", "time", "version")
_FAILURES = (Exception, SystemExit)
"""A tracker's failures. Some end the program where they find no account."""


class Trackers:
    """Trackers of a run; without any, it does nothing. One that fails is noted once and then left out."""

    def __init__(self, trackers: Mapping[str, Tracker], new: Sequence[str], note: Callable[[str], None]) -> None:
        """Set up.

        Args:
            trackers: open trackers by name.
            new: names of those that have not had this run before.
            note: shows a line of text to the user.
        """
        self._open = dict(trackers)
        self._new = set(new)
        self._note = note

    def rewind(self, version: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """The run continues from `version`; a tracker that is new to it first gets the `lines` of metrics.jsonl."""
        for name in list(self._open):
            if name in self._new:
                self._new.remove(name)
                self._try(name, lambda tracker: _replay(tracker, lines))
            else:
                self._try(name, lambda tracker: tracker.rewind(version))

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl was written."""
        found = figures(line)
        self._each(lambda tracker: tracker.figures(line.get("version", 0), found))

    def samples(self, version: int, prompts: Sequence[str], images: torch.Tensor) -> None:
        """Images [prompts, 3, H, W] in [0, 1] of the held-out prompts under a version; the first are shown."""
        if self._open and len(images):
            sheet = contact_sheet(images[:SHOWN_PROMPTS])
            caption = "\n".join(f"{i}. {prompt}" for i, prompt in enumerate(prompts[:SHOWN_PROMPTS], 1))
            self._each(lambda tracker: tracker.images(version, sheet, caption))

    def report(self, page: Path) -> None:
        """The report was written."""
        self._each(lambda tracker: tracker.report(page))

    def close(self, *, failed: bool) -> None:
        """Close all; may wait for uploads. `failed`: the run ended by an error."""
        self._each(lambda tracker: tracker.close(failed=failed))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name in list(self._open):
            self._try(name, act)

    def _try(self, name: str, act: Callable[[Tracker], None]) -> None:
        if name in self._open:
            try:
                act(self._open[name])
            except _FAILURES as error:
                del self._open[name]
                self._note(failed(name, error))


def _replay(tracker: Tracker, lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        tracker.figures(line.get("version", 0), figures(line))


@contextmanager
def open_trackers(config: RunConfig, note: Callable[[str], None]) -> Iterator[Trackers]:
    """The trackers of a run, closed at the end of the block. One that cannot be opened is noted and left out."""
    path = config.output / KEYS
    keys: dict[str, str] = read_json(path) if config.track and path.is_file() else {}
    known, settings = set(keys), config.model_dump(mode="json")
    found: dict[str, Tracker] = {}
    for name in config.track:
        key = keys.get(name) or "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(21))
        try:
            found[name] = TRACKERS.find(name)(TrackedRun(config.run, key, config.output, settings))
        except _FAILURES as error:
            note(failed(name, error))
            continue
        keys[name] = key
    if config.track:
        path.write_text(json.dumps(keys), encoding="utf-8")
    trackers = Trackers(found, [name for name in found if name not in known], note)
    try:
        yield trackers
    except BaseException:
        trackers.close(failed=True)
        raise
    trackers.close(failed=False)


def failed(name: str, error: BaseException) -> str:
    """The note about a tracker that failed."""
    said = " ".join(str(error).split()) or type(error).__name__
    return f"tracker {name} gets no more of this run: {said}; metrics.jsonl has all figures"


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a line of metrics.jsonl, by `event/key`, and `event/key/name` within a mapping."""
    found: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}/{key}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value

    for key, value in line.items():
        if key not in _NOT_FIGURES:
            add(f"{line['event']}/{key}", value)
    return found


def contact_sheet(images: torch.Tensor) -> Image.Image:
    """Images float [N, 3, H, W] in [0, 1] in rows of four, at most 256 px a side each."""
    images = images.detach().float().cpu().clamp(0, 1)
    side = max(images.shape[-2:])
    if side > _SIDE:
        size = [max(1, round(length * _SIDE / side)) for length in images.shape[-2:]]
        images = interpolate(images, size=size, mode="area")
    count, _, height, width = images.shape
    columns = min(count, _COLUMNS)
    sheet = Image.new("RGB", (columns * width, -(-count // columns) * height), "white")
    for index, image in enumerate((images * 255).round().to(torch.uint8)):
        row, column = divmod(index, columns)
        sheet.paste(Image.fromarray(image.permute(1, 2, 0).numpy()), (column * width, row * height))
    return sheet
