"""Weights & Biases, Trackio and SwanLab, whose packages are called almost alike.

A run is in the project $WANDB_PROJECT, $TRACKIO_PROJECT or $SWANLAB_PROJECT, or `solrl`. WANDB_MODE=offline and
SWANLAB_MODE=offline keep it here, for `wandb sync` and `swanlab sync`; then, a resumed run becomes a run of its own.
Trackio has a database on this machine, which `trackio show` displays.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from solrl_trainer.records.trackers.tracker import TrackedRun, Tracker


class Hosted(Tracker):
    """A run that the package's `init` has opened with further `options`."""

    package: ClassVar[str]

    def __init__(self, run: TrackedRun, **options: Any) -> None:
        self._key = run.key
        self._module: Any = import_module(self.package)
        project = os.environ.get(f"{self.package.upper()}_PROJECT", "solrl")
        self._run = self._module.init(project=project, config=dict(run.settings), **options)

    def figures(self, version: int, figures: Mapping[str, Any]) -> None:
        """Values with the version as step."""
        self._run.log(dict(figures), step=version)

    def images(self, version: int, sheet: Image.Image, caption: str) -> None:
        """One image, as a value."""
        self.figures(version, {"samples": self._module.Image(sheet, caption=caption)})

    def report(self, page: Path) -> None:
        artifact = self._module.Artifact(f"report-{self._key}", type="report")
        artifact.add_file(str(page))
        self._run.log_artifact(artifact)

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        self._run.finish()


class Wandb(Hosted):
    """A run at Weights & Biases. Its charts are over the version, since the own step cannot go back."""

    package = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        # `wandb sync` counts the entries of each offline folder from 0, also under a former key.
        online = import_module("wandb").setup().settings.mode in ("online", "shared")
        same_run = {"id": run.key, "resume": "allow"} if online else {}
        super().__init__(run, dir=str(run.folder), name=run.name, **same_run)
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def figures(self, version: int, figures: Mapping[str, Any]) -> None:
        """One entry of the history."""
        self._run.log({**figures, "version": version})

    def close(self, *, failed: bool) -> None:
        """Wait for uploads."""
        self._run.finish(exit_code=int(failed))


class Trackio(Hosted):
    """A run of Trackio, which knows runs by their names."""

    package = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        local = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        super().__init__(run, name=f"{run.name}-{run.key[:6]}", resume="allow", **local)


class SwanLab(Hosted):
    """A run at SwanLab."""

    package = "swanlab"

    def __init__(self, run: TrackedRun) -> None:
        mode = os.environ.get("SWANLAB_MODE", "online")
        same_run = {"id": run.key, "resume": "allow"} if mode == "online" else {}
        super().__init__(run, name=run.name, log_dir=str(run.folder / "swanlab"), mode=mode, **same_run)

    def report(self, page: Path) -> None:
        """A file of the run."""
        self._run.save(str(page), base_path=str(page.parent))

    def close(self, *, failed: bool) -> None:
        """Wait for uploads."""
        self._run.finish("crashed" if failed else "success")
