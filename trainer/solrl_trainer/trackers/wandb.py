"""Weights & Biases, project $WANDB_PROJECT or `solrl`; WANDB_MODE=offline keeps the run here for `wandb sync`."""

import os
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from solrl_trainer.trackers.tracker import TrackedRun, Tracker


class Wandb(Tracker):
    """A run at Weights & Biases. Its charts are over the version, since the own step cannot go back."""

    package = "wandb"

    @classmethod
    def reopens(cls) -> bool:
        """Only online: `wandb sync` counts the entries of each offline folder from 0, also under a former key."""
        import wandb

        return str(wandb.setup().settings.mode) in ("online", "shared")

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "solrl"),
            dir=str(run.folder),
            name=run.name,
            id=run.key,
            resume="allow",
            config=dict(run.settings),
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def figures(self, version: int, figures: Mapping[str, float]) -> None:
        """One entry of the history."""
        self._run.log({**figures, "version": version})

    def images(self, version: int, sheet: Image.Image, caption: str) -> None:
        """One image of the history."""
        self._run.log({"samples": self._wandb.Image(sheet, caption=caption), "version": version})

    def report(self, page: Path) -> None:
        """An artefact."""
        artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(page))
        self._run.log_artifact(artifact)

    def close(self, *, failed: bool) -> None:
        """Wait for uploads."""
        self._run.finish(exit_code=int(failed))
