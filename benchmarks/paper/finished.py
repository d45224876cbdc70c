"""Finished runs: one small JSON file each, with all that the tables need. Folders are merged by copying files.

An archive beside the page has all of them: the tables can be written again from it, or continued.
"""

import gzip
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from solrl_trainer.settings.config import RunConfig

from paper.experiments import OWN_SETTINGS, Experiment
from paper.intervals import Values

FINISHED = "finished"
ARCHIVE = Path("paper/finished.tar.gz")
DIGITS = 7

PLACEMENT = {"optimizer.checkpointing", "regenerate.share", "regenerate.selection"}
"""Settings of stored runs that did not say what a run computed; presets lack them now, or have other ones."""
WITHOUT_EFFECT: Mapping[str, Sequence[Any]] = {
    "optimizer.streamed": (True, False),
    "optimizer.reference": ("bf16",),
    "optimizer.betas": ([0.9, 0.999],),
    "optimizer.eps": (1e-8,),
    "optimizer.epochs": (1,),
    "explore.adapter": ("merged",),
    "explore.frames": (None,),
    "explore.refill": (0,),
    "explore.selection": ("best_worst",),
    "policy.counter": ("iterations",),
    "evaluate.fidelity_wanted": (0.75,),
    "algorithm.advantage_mode": ("all",),
    "algorithm.power": (0.25,),
    "algorithm.ratio_clip": (1.0,),
    "algorithm.adv_max": (1.0,),
    "algorithm.old_kl_weight": (1.0,),
    "algorithm.kl_weighting": ("uniform",),
    "algorithm.weighting": ("ghuber",),
    "algorithm.trust_region": ("clip",),
    "algorithm.kl_threshold": (1e-5,),
    "algorithm.noise_range": (0.9,),
    "algorithm.initial_noise": (True,),
}
"""Setting of stored runs that is gone → its values that are what every run does now."""


class MixedRunsError(ValueError):
    """Finished runs that must not stand in one table."""


@dataclass(frozen=True)
class Finished:
    """A finished run.

    Attributes:
        name: name of its experiment.
        machine: device and torch.
        jobs: runs at a time, over all GPUs.
        prompts: held-out prompts.
        before, after: reward → its mean per held-out prompt [prompts], of the base and of the averaged weights. `after`
            is empty if the run stopped at a loss or gradient that is not finite.
        within: reward → the base's standard deviation among the images of a prompt.
        curve: (iterations, reward → mean over the held-out images), the base first.
        iterations: lines of metrics.jsonl.
        fidelity: rank fidelity of exploration, lines of metrics.jsonl.
        stopped: why the run stopped early, or None.
        words: engine → what it reads in the first image of each held-out prompt, "before" and "after"; empty until
            `paper.words` has read them.
    """

    name: str
    machine: str
    jobs: int
    config: RunConfig
    prompts: list[str]
    before: Mapping[str, Values]
    after: Mapping[str, Values]
    within: Mapping[str, float]
    curve: list[tuple[int, Mapping[str, float]]]
    iterations: list[dict[str, Any]]
    fidelity: list[dict[str, Any]]
    stopped: str | None = None
    words: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)

    def gain(self, reward: str) -> Values:
        """Gain per prompt [prompts], in standard deviations of the base within a prompt."""
        return (self.after[reward] - self.before[reward]) / self.within[reward]


Runs = Mapping[str, Finished]
"""Finished runs by the name of their experiment."""


def record(experiment: Experiment, **values: Any) -> dict[str, Any]:
    """Content of a finished run's file; `values` are the attributes of `Finished` except its name, and others."""
    scores = {
        when: {name: [round(float(one), DIGITS) for one in row] for name, row in values[when].items()}
        for when in ("before", "after")
    }
    return {
        **asdict(experiment),
        **values,
        **scores,
        "config": values["config"].model_dump(mode="json", exclude=set(OWN_SETTINGS)),
    }


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file of a finished run, all of it or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, allow_nan=False) + "\n")
    partial.replace(path)


def file_of(name: str, folder: Path, ending: str = "json") -> Path:
    """File of a finished run; it may have images, too: a grid, `png`, or those of words, `words.png`."""
    return folder / FINISHED / f"{name}.{ending}"


def read_finished(experiments: Sequence[Experiment], folder: Path) -> dict[str, Finished]:
    """The finished ones of these runs.

    Raises:
        MixedRunsError: those with one set of prompts are of different machines, or were judged on different prompts of
            it, or one has settings that its preset does not have any more.
    """
    files = {one: file_of(one.name, folder) for one in experiments}
    found = {one.name: _read(one, path) for one, path in files.items() if path.is_file()}
    for prompts in {str(run.config.prompts) for run in found.values()}:
        _require_alike([run for run in found.values() if str(run.config.prompts) == prompts], folder)
    return found


def _require_alike(runs: Sequence[Finished], folder: Path) -> None:
    machines = sorted({run.machine for run in runs})
    if len(machines) > 1:
        raise MixedRunsError(
            f"{folder} has runs of {len(machines)} machines: {'; '.join(machines)}; expected one, because rounding "
            "differs between them: use another --runs, or delete the runs of one"
        )
    if len({tuple(run.prompts) for run in runs if run.prompts}) > 1:
        raise MixedRunsError(
            f"the runs in {folder} were judged on different prompts; expected the same: use another --runs"
        )


def _read(experiment: Experiment, path: Path) -> Finished:
    content = json.loads(path.read_text())
    _require_settings(experiment, content["config"], path)
    for when in ("before", "after"):
        content[when] = {name: np.array(row, dtype=np.float64) for name, row in content[when].items()}
    content |= {"name": experiment.name, "config": experiment.config}
    return Finished(**{one.name: content[one.name] for one in fields(Finished) if one.name in content})


def _require_settings(experiment: Experiment, stored: Mapping[str, Any], path: Path) -> None:
    """Refuse a run whose settings the preset does not give any more; settings that were added since are allowed."""
    now = _by_key(experiment.config.model_dump(mode="json", exclude=set(OWN_SETTINGS)))
    then = _by_key(stored)
    gone = {key for key, values in WITHOUT_EFFECT.items() if then.get(key) in values}
    differing = sorted(key for key in then.keys() - PLACEMENT - gone if then[key] != now.get(key))
    if differing:
        raise MixedRunsError(
            f"{path} was run with other values of {', '.join(differing)} than {experiment.preset} has now; "
            "delete it, or use another --runs"
        )


def _by_key(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key."""
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in settings.items()}
    return {f"{name}.{key}".rstrip("."): one for name, values in sections.items() for key, one in values.items()}


def store(names: Iterable[str], folder: Path, out: Path) -> None:
    """Write the files of these runs to the archive in `out`; equal runs give an equal archive.

    The archive keeps its other runs, such as those of a model that this command's tables leave out, if `folder` has
    their files.
    """
    target = out / ARCHIVE
    own = {file_of(name, folder) for name in names}
    if target.is_file():
        with tarfile.open(target) as archive:
            own |= {path for name in archive.getnames() if (path := folder / name).is_file()}
    paths = sorted(own)
    if not paths:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with (
        partial.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in paths:
            about = tarfile.TarInfo(f"{FINISHED}/{path.name}")
            about.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(about, content)
    partial.replace(target)


def take_stored(out: Path, folder: Path) -> None:
    """Unpack the archive in `out` to the folder of the runs; a run that is there already stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / ARCHIVE) as archive:
        new = [one for one in archive.getmembers() if not (folder / one.name).exists()]
        archive.extractall(folder, members=new, filter="data")
