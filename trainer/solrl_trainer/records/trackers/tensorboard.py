"""TensorBoard: event files in the folder `tensorboard` of the run; `tensorboard --logdir runs` shows all runs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from solrl_trainer.records.trackers.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """A run's event files; a run that goes back drops later steps. A report is only named: no files are kept."""

    package = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=run.version + 1 if folder.exists() else None)
        self._writer.add_text("settings", f"```yaml\n{yaml.safe_dump(dict(run.settings), sort_keys=False)}```")

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
