"""TensorBoard: event files in the folder `tensorboard` of the run; `tensorboard --logdir runs` shows all runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from solrl_trainer.trackers.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """A run's event files. A report is only named, since TensorBoard keeps no files."""

    package = "tensorboard"
    repairs = True

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder / "tensorboard"
        self._open(None)
        self._writer.add_text("settings", f"```yaml\n{yaml.safe_dump(dict(run.settings), sort_keys=False)}```")

    def _open(self, purged_from: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=purged_from)

    def repair(self, version: int, told: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Hide what was logged beyond `version`, and add what a run that was killed did not log."""
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

        self._writer.close()
        self._open(version + 1)
        self._writer.flush()
        found = EventAccumulator(str(self._folder), size_guidance={SCALARS: 0}).Reload()
        held = {(tag, one.step) for tag in found.Tags()[SCALARS] for one in found.Scalars(tag)}
        for one, figures in told:
            self.figures(one, {name: value for name, value in figures.items() if (name, one) not in held})

    def figures(self, version: int, figures: Mapping[str, float]) -> None:
        """Scalars with the version as step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def images(self, version: int, sheet: Image.Image, caption: str) -> None:
        """One image; the captions are a text beside it."""
        self._writer.add_image("samples", np.asarray(sheet), version, dataformats="HWC")
        self._writer.add_text("samples/prompts", caption.replace("\n", "  \n"), version)
        self._writer.flush()

    def report(self, page: Path) -> None:
        """Its path."""
        self._writer.add_text("report", str(page.resolve()))

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()
