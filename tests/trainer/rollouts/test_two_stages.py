"""Both stages in the trainer: equal to a run with a service, bit for bit."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_core.errors import MismatchError
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_trainer import loop
from solrl_trainer.commands import run as command
from solrl_trainer.evaluation.gallery import load_gallery
from solrl_trainer.loop import Result, train
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.rollouts.device_source import DeviceSource
from solrl_trainer.service.service_source import ServiceSource
from tests.support.service_helpers import RunningService
from tests.support.small_model import small_model
from tests.trainer.real_runs import Watcher
from tests.trainer.training_helpers import events, tiny_config, unclocked

SMALL = (
    f"model={small_model()}",
    *("explore.prompts=2", "explore.candidates=26", "explore.keep=6", "explore.precision=nvfp4", "explore.steps=3"),
    *("regenerate.steps=3", "iterations=2", "optimizer.updates=1", "optimizer.batch=6", "lora.rank=2"),
    *("evaluate.prompts=1", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.fidelity_prompts=1"),
    *("rewards={clipscore: 1, verifier: 0}", "optimizer.learning_rate=1e-2"),
)
"""Settings with more candidates than a chunk, and a reward that the service does not have."""


FITTED = (
    "{sigmas: [1.0, 0.7, 0.4], step_coeffs: [[0.7, 0.3], [0.5714, 0.0, 0.4286]], "
    "x0_coeffs: [[0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]}"
)
"""Euler steps as a fitted solver, which ends at its last prediction."""
PLANS = {"whole": ("iterations=2",), "fitted": (f"explore.fitted={FITTED}", "iterations=1")}


@dataclass
class Run:
    folder: Path
    result: Result
    notes: list[str]

    @property
    def scored(self) -> set[tuple[str, str, str]]:
        """Images that rewards scored, the rewards, and the programs that did, of all iterations."""
        times = [one for line in events(self.folder, "iteration") for one in line["scoring"]]
        assert all(one["seconds"] > 0 for one in times if one["reward"] == "clipscore")
        return {(one["of"], one["reward"], one["by"]) for one in times}


def go(folder: Path, *settings: str, url: str | None = None) -> Run:
    where = ("rollout_url=null",) if url is None else ()
    config = tiny_config(*SMALL, *where, *settings, output=folder, run=folder.name, rollout_url=url)
    watcher = Watcher()
    with shown_log(watcher.notes.append):
        return Run(folder, train(config, watcher), watcher.notes)


@pytest.fixture(scope="module", params=PLANS)
def both(
    request: pytest.FixtureRequest, small_service: RunningService, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Run]:
    """A run with a service, and the same run with local exploration."""
    settings, folder = PLANS[request.param], tmp_path_factory.mktemp(request.param)
    served = go(folder / request.param, *settings, url=small_service.url)
    return served, go(folder / "local", *settings)


@pytest.mark.slow
def test_a_local_run_equals_the_run_with_a_service_bit_for_bit(both: tuple[Run, Run]) -> None:
    served, local = both
    assert unclocked(served.folder) == unclocked(local.folder)
    for run, explorer, waits in ((served, "service", {"wait"}), (local, "trainer", set())):
        samples = {("samples", name, "trainer") for name in ("clipscore", "verifier")}
        assert run.scored == {("candidates", "clipscore", explorer), *samples}
        phases = {"explore", "regenerate", "train"} | waits
        assert all(line["seconds"].keys() == phases for line in events(run.folder, "iteration"))
    assert events(local.folder, "fidelity")
    digests = [line["digest"] for line in events(local.folder, "iteration")]
    assert len(set(digests)) == len(digests) > 0
    theirs, ours = served.result.samples, local.result.samples
    for one, other in zip(theirs.groups, ours.groups, strict=True):
        assert one.prompt == other.prompt
        assert one.seeds == other.seeds
        assert one.scores == other.scores
        assert torch.equal(one.samples.latents, other.samples.latents)
    assert torch.equal(theirs.scores, ours.scores)
    assert theirs.exploration.score_sum == ours.exploration.score_sum
    assert theirs.exploration.score_count == ours.exploration.score_count
    # The report shows the same images; the service's are PNGs.
    theirs, ours = served.result.pairs, local.result.pairs
    assert theirs.pairs == ours.pairs
    assert float((theirs.explored - ours.explored).abs().max()) <= 0.51 / 255
    assert torch.equal(theirs.regenerated, ours.regenerated)
    assert float((ours.explored - ours.regenerated).abs().max()) > 0.51 / 255, "more than a PNG rounds"
    assert any("emulates" in note for note in local.notes)
    assert not any("127.0.0.1" in note for note in local.notes)


ONE = ("iterations=1", "explore.candidates=8", "explore.prompts=1", "explore.precision=auto")


def test_a_report_can_omit_the_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> None:
    def refused(*_: Any) -> None:
        raise ProblemError(ProblemKind.VERSION_NOT_FOUND, "version 0 is gone")

    monkeypatch.setattr(DeviceSource, "images_of", refused)
    config = tiny_config(*SMALL, "rollout_url=null", *ONE, "rewards=clipscore", output=tmp_path)
    summary = command.run(config)
    assert summary["spearman"] is not None
    (note,) = (note for note in notes if note.startswith("the report does not show"))
    assert "version 0 is gone" in note
    gallery = load_gallery(tmp_path)
    assert (gallery.pairs, gallery.explored) == ([], None)
    assert config.preset in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("at", ["service", "trainer"])
def test_no_wait_for_images(
    at: str, small_service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Any = ServiceSource if at == "service" else DeviceSource
    images_of, train_step, trained = source.images_of, loop.train_step, threading.Event()

    def late(*arguments: Any) -> Any:
        assert trained.wait(600), "training waits for these images"
        return images_of(*arguments)

    def telling(*arguments: Any) -> None:
        train_step(*arguments)
        trained.set()

    monkeypatch.setattr(source, "images_of", late)
    monkeypatch.setattr(loop, "train_step", telling)
    run = go(tmp_path / f"late-{at}", *ONE, url=small_service.url if at == "service" else None)
    pairs = run.result.pairs
    assert len(pairs.pairs) == len(pairs.explored) == 6


def test_plans_for_other_models_and_unsupported_fp8_are_refused(tmp_path: Path) -> None:
    bound = "explore.calibrated_for={model: 'sha256:%s', solver: euler, guidance: 1.0}" % ("0" * 64)
    with pytest.raises(MismatchError, match="calibrated for a different model than"):
        go(tmp_path, *ONE, bound)
    with pytest.raises(ValueError, match="precision fp8: this CPU has no FP8 matrix units"):
        go(tmp_path, *ONE, "explore.precision=fp8", "model=/nowhere")
