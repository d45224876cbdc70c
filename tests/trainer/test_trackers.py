"""Trackers: a real TensorBoard is read back; failures, missing packages and what each tracker is told."""

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from solrl_trainer.__main__ import main
from solrl_trainer.records.evaluations import Evaluation
from solrl_trainer.records.records import HeldOutRecord
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.records.trackers.run_trackers import contact_sheet, figures, open_trackers
from solrl_trainer.records.trackers.tracker import TrackedRun, Tracker
from solrl_trainer.run_folder.metrics_file import MetricsFile, read_metrics
from solrl_trainer.settings.config import RunConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.typed import refused
from tests.trainer.run_folders import iteration_line
from tests.trainer.training_helpers import tiny_config

PROMPTS = ["a red circle", "two blue squares"]
RECORDER = f"{__name__}:Recorder"


class Recorder(Tracker):
    """A tracker that keeps what it is told, and fails where it is told to."""

    told: list[tuple[Any, ...]]
    fails_at = ""

    def __init__(self, run: TrackedRun) -> None:
        self._tell("open", run.key)

    def _tell(self, *what: Any) -> None:
        if what[0] == type(self).fails_at:
            raise SystemExit(7) if what[0] == "open" else ConnectionError("no route to the tracker")
        type(self).told.append(what)

    def figures(self, version: int, figures: Any) -> None:
        self._tell("figures", version, *figures)

    def images(self, version: int, sheet: Image.Image, caption: str) -> None:
        self._tell("images", version, sheet.size, caption)

    def report(self, page: Path) -> None:
        self._tell("report", page.name)

    def close(self, *, failed: bool) -> None:
        self._tell("close", failed)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "told", [], raising=False)


def run_once(
    config: RunConfig, notes: list[str], *, version: int = -1, iterations: range = range(2), back: bool = False
) -> None:
    """Log what a run from `version` on logs: evaluations of its first and last version, and its iterations."""
    config.output.mkdir(parents=True, exist_ok=True)
    evaluation = Evaluation({"clipscore": torch.full((2, 1), 0.25)}, torch.rand(2, 3, 8, 8))
    with shown_log(notes.append), open_trackers(config) as trackers:
        log = RunLog(MetricsFile(config.output / "metrics.jsonl"), trackers=trackers)
        log.rewind(version, back=back)
        log.evaluated(HeldOutRecord.of(0, evaluation, evaluation, {"clipscore": 1.0}, 2, 1), evaluation, PROMPTS)
        for iteration in iterations:
            line = iteration_line(iteration)
            log._log(line.pop("event"), **line)
        last = HeldOutRecord.of(iterations.stop, evaluation, evaluation, {"clipscore": 1.0}, 2, 1)
        log.evaluated(last, evaluation, PROMPTS)
        trackers.report(config.output / "report.html")
    notes[:] = [note for note in notes if not note.startswith("held out")]


def tracked(folder: Path, *names: str) -> RunConfig:
    return tiny_config(output=folder, run="tracked").model_copy(update={"track": names})


def test_figures_have_the_names_of_the_metrics() -> None:
    line = iteration_line(3)
    found = figures(line | {"time": 1.0, "flag": True})
    assert found["iteration/loss"] == line["loss"]
    assert found["iteration/rewards/clipscore"] == line["rewards"]["clipscore"]
    assert found["iteration/seconds/wait"] == 3.5
    assert not {"iteration/time", "iteration/flag", "iteration/digest", "iteration/version"} & found.keys()
    assert figures({"event": "fidelity", "version": 0, "top_overlap": {"4": 0.5}}) == {"fidelity/top_overlap/4": 0.5}


def read_back(folder: Path) -> EventAccumulator:
    """The events of a folder's run at TensorBoard."""
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard_has_all_figures_settings_images_and_the_report_also_of_a_resumed_run(tmp_path: Path) -> None:
    notes: list[str] = []
    run_once(tracked(tmp_path, "tensorboard"), notes, iterations=range(4))
    run_once(tracked(tmp_path, "tensorboard"), notes, version=2, iterations=range(2, 3), back=True)
    assert notes == []
    found = read_back(tmp_path)
    tags = found.Tags()
    expected: dict[str, dict[int, float]] = {}
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        for name, value in figures(line).items():
            expected.setdefault(name, {})[line["version"]] = pytest.approx(value)
    assert {name: {one.step: one.value for one in found.Scalars(name)} for name in tags["scalars"]} == expected
    assert sorted(image.step for image in found.Images("samples")) == [0, 3]
    assert (found.Images("samples")[0].width, found.Images("samples")[0].height) == (16, 8)
    texts = {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    assert "learning_rate: 0.001" in texts["settings/text_summary"]
    assert texts["samples/prompts/text_summary"] == "1. a red circle  \n2. two blue squares"
    assert texts["report/text_summary"] == str(tmp_path / "report.html")


def test_a_tracker_of_another_package_is_told_in_order(tmp_path: Path) -> None:
    notes: list[str] = []
    run_once(tracked(tmp_path, RECORDER), notes)
    kinds = [(what[0], *what[1:2]) for what in Recorder.told]
    key = (tmp_path / "tracker-key.txt").read_text()
    assert kinds == [
        ("open", key),
        *[("figures", 0), ("images", 0), ("figures", 1), ("figures", 2), ("figures", 2), ("images", 2)],
        *[("report", "report.html"), ("close", False)],
    ]
    assert Recorder.told[2] == ("images", 0, (16, 8), "1. a red circle\n2. two blue squares")


def test_a_tracker_is_told_that_its_run_failed(tmp_path: Path) -> None:
    config = tracked(tmp_path, RECORDER)
    stack = ExitStack()
    stack.enter_context(open_trackers(config)).start(-1, anew=True)
    with pytest.raises(KeyboardInterrupt), stack:
        raise KeyboardInterrupt
    assert Recorder.told[1:] == [("close", True)]


def test_a_resumed_run_is_the_same_run_and_gets_only_what_is_new(tmp_path: Path) -> None:
    notes: list[str] = []
    run_once(tracked(tmp_path), notes, iterations=range(1))
    assert not (tmp_path / "tracker-key.txt").exists()
    for version in (1, 2, 2):
        run_once(tracked(tmp_path, RECORDER), notes, version=version, iterations=range(version, version + 1))
    assert [what[1] for what in Recorder.told if what[0] in ("figures", "images")] == [2, 2, 2] + [3, 3, 3] * 2
    run_once(tracked(tmp_path, RECORDER), notes, version=1, back=True)
    run_once(tracked(tmp_path, RECORDER), notes)
    first, *same, gone_back, new = (what[1] for what in Recorder.told if what[0] == "open")
    assert set(same) == {first}
    assert len({first, gone_back, new}) == 3
    assert notes == []


@pytest.mark.parametrize("at", ["open", "figures", "images", "report", "close"])
def test_a_tracker_fails_once_and_the_run_goes_on(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(Recorder, "fails_at", at)
    run_once(tracked(tmp_path, RECORDER, "tensorboard"), notes)
    (note,) = notes
    assert note.startswith(f"tracker {RECORDER} gets no more of this run: ")
    assert ("no route to the tracker" in note) == (at != "open")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    assert len(read_back(tmp_path).Scalars("iteration/loss")) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandb", "tracker 'wandb' needs the package 'wandb', which is not installed: pip install 'solrl[wandb]'"),
        ("trackio", "pip install 'solrl[trackio]'; or run without it (--set track=[])"),
        ("swanlab", "pip install 'solrl[swanlab]'"),
        ("tensorbord", "got tracker 'tensorbord' (did you mean 'tensorboard'?)"),
    ],
)
def test_a_missing_tracker_is_refused(tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solrl_trainer.records.trackers.registry.find_spec", lambda package: None)
    assert message in refused(main, "run", "--dry-run", "--output", str(tmp_path / "run"), "--track", name)


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_hosted_trackers_take_a_run_and_its_resume(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(name) is None:
        pytest.skip(f"the extra `{name}` is not installed")
    for variable in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.setenv(variable, "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "report.html").write_text("<p>report</p>")
    notes: list[str] = []
    run_once(tracked(tmp_path, name), notes)
    run_once(tracked(tmp_path, name), notes, version=1, iterations=range(1, 3))
    assert notes == []


def test_images_lie_in_rows_and_large_ones_shrink() -> None:
    images = torch.zeros(5, 3, 8, 16)
    images[4, 0] = 1.0
    sheet = contact_sheet(images)
    assert sheet.size == (64, 16)
    assert sheet.getpixel((3, 12)) == (255, 0, 0)
    assert sheet.getpixel((3, 3)) == (0, 0, 0)
    assert contact_sheet(torch.zeros(1, 3, 512, 1024)).size == (256, 128)
    clips = torch.arange(8.0).view(1, 8, 1, 1, 1).expand(5, 8, 3, 32, 64) / 8
    sheet = contact_sheet(clips)
    assert sheet.size == (4 * 128, 2 * 64)
    assert [sheet.getpixel((128 + x, y))[0] for y in (0, 63) for x in (0, 127)] == [32, 96, 159, 223]
