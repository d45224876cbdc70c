"""What a run tells its service for the page."""

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solrl_client.rollouts import RolloutClient
from solrl_core.image_files import lossless_file
from solrl_proto.problems import ProblemKind
from solrl_proto.rollouts import PromptItem
from solrl_proto.status import Estimate, HeldOut, RunSettings
from solrl_trainer.loop import begin_comparisons
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.records.records import HeldOutRecord
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.records.status_reports import StatusReporter, run_settings
from solrl_trainer.rollouts.image_comparisons import compare_images
from solrl_trainer.service.run_requests import RunRequests
from solrl_trainer.settings.config import RunConfig
from tests.trainer.hostile_service import Answer, HostileService, hostile_service
from tests.trainer.run_folders import iteration_record
from tests.trainer.training_helpers import tiny_config

LOST, ARRIVED, REFUSED = Answer(503), Answer(), Answer(422)


@pytest.fixture
def service() -> Iterator[HostileService]:
    with hostile_service() as running:
        yield running


@contextmanager
def reporting(
    service: HostileService, answers: Sequence[Answer], notes: list[str], config: RunConfig | None = None
) -> Iterator[StatusReporter]:
    """A reporter whose reports get these answers; at the end, all are sent."""
    service.answers = list(answers)
    client = RolloutClient(service.url, patience=0)
    with StatusReporter(client, config or tiny_config(), lambda: pytest.fail("no images are due")) as reporter:
        yield reporter
    assert service.answers == []


def evaluation(version: int) -> HeldOutRecord:
    return HeldOutRecord(version, 8, {"clipscore": Estimate(mean=0.5, low=0.4, high=0.6)})


def brought(service: HostileService) -> list[tuple[int, bool, list[int]]]:
    """Iteration of each report, whether it has settings, and the versions of its evaluations."""
    bodies: list[dict[str, Any]] = [json.loads(body) for body in service.bodies if body]
    return [(one["iteration"], "settings" in one, [v["version"] for v in one.get("held_out", ())]) for one in bodies]


def test_evaluations_and_settings_come_with_the_first_that_arrives(service: HostileService, notes: list[str]) -> None:
    with reporting(service, [LOST, LOST, *[ARRIVED] * 4, LOST, ARRIVED], notes) as reporter:
        reporter.evaluated(evaluation(0))
        for iteration in range(4):
            reporter.report(iteration_record(iteration))
        reporter.evaluated(evaluation(4))
        for iteration in (4, 5):
            reporter.report(iteration_record(iteration))
        reporter.ended("no new best")
    assert brought(service) == [
        *((iteration, True, [0]) for iteration in (0, 1, 2)),
        *((3, bool(versions), versions) for versions in ([], [4])),
        *((iteration, False, []) for iteration in (4, 5)),
        (5, False, []),
    ]
    assert json.loads(service.bodies[-1])["ended"] == "no new best"
    (note,) = notes
    assert note.startswith(f"the service's page does not show all of this run: {ProblemKind.UNEXPECTED_ANSWER.title}")


def test_refused_reports_return_without_settings_evaluations_samples(service: HostileService, notes: list[str]) -> None:
    pairs = compare_images(samples(), lambda *_: (torch.rand(2, 3, 8, 8), 0.0), prompts=1, per_end=1)
    with reporting(service, [REFUSED, ARRIVED, ARRIVED, REFUSED, ARRIVED, ARRIVED], notes) as reporter:
        reporter.evaluated(evaluation(0))
        reporter.show_comparisons(0, samples(), pairs)
        reporter.report(iteration_record(0))
        reporter.report(iteration_record(1))
        reporter.evaluated(evaluation(2))
        reporter.report(iteration_record(2))
    plain = [(iteration, False, []) for iteration in range(3)]
    assert brought(service) == [(0, True, [0]), *plain[:2], (1, True, [2]), *plain[1:]]
    assert [b'"samples":' in body for body in service.bodies] == [True, *[False] * 5]
    assert len(notes) == 1


def test_what_cannot_be_told_ends_neither_run_nor_reports(service: HostileService, notes: list[str]) -> None:
    many = tiny_config(f"rewards=[{', '.join(f'reward{i}' for i in range(17))}]")
    with reporting(service, [ARRIVED, ARRIVED], notes, many) as reporter:
        reporter.evaluated(HeldOutRecord(0, 8, {"long" * 40: Estimate(mean=0.5, low=0.4, high=0.6)}))
        reporter.report(iteration_record(0))
        reporter.report(iteration_record(1))
    assert brought(service) == [(0, False, []), (1, False, [])]
    assert len(notes) == 1


def png(side: int) -> str:
    return base64.b64encode(lossless_file(torch.zeros(side, side, 3, dtype=torch.uint8))).decode()


def samples() -> Any:
    trained = SimpleNamespace(scores=torch.rand(2), images=torch.rand(2, 3, 8, 8))
    group = SimpleNamespace(prompt=PromptItem(id="a", text="a"), seeds=(1, 2), scores=(0.2, 0.1), trained=trained)
    explored = SimpleNamespace(version=0, iteration=0, precision="bf16", numerics="native")
    return SimpleNamespace(groups=[group], scores=trained.scores[None], exploration=explored)


@pytest.mark.parametrize(
    ("images", "fault"),
    [
        ([png(8)], "images; got '1 images'"),
        ([png(8), None], "a line that cannot be read (group.images.1: Input should be a valid string)"),
        ([png(8), "%%%"], "images[1]; got '0 bytes"),
        ([png(8), "aW1hZ2U="], "images[1]; got '5 bytes that are no such image"),
        ([png(9), png(8)], "images[0]; got 'an image of 9 × 9 pixels"),
    ],
)
def test_wrong_pictures_of_a_service_end_no_run(
    service: HostileService, notes: list[str], images: list[str | None], fault: str
) -> None:
    service.change_group = lambda line: line.update(images=images)
    model: Any = SimpleNamespace(height=8, width=8, frames=1)
    with RolloutClient(service.url, patience=0) as client:
        source = RunRequests(tiny_config(), client, model=model)
        common = {"models": None, "adapters": {0: b""}, "source": source}
        session: Any = SimpleNamespace(world=Communicator(), config=tiny_config(), **common)
        assert begin_comparisons(session, RunLog(), 0, samples())() is None
        assert fault in notes[-1], notes
        service.change_group = lambda line: line.update(images=[png(8), png(8)])
        assert begin_comparisons(session, RunLog(), 0, samples())().explored.shape == (2, 3, 8, 8)


def test_images_take_at_most_a_hundredth_of_the_services_time() -> None:
    now, asked = [0.0], []

    class Source:
        def images_of(self, *_: Any) -> tuple[torch.Tensor, float]:
            asked.append(now[0])
            now[0] += 7.0  # most of this was spent in the queue
            if len(asked) == 3:
                raise ConnectionError
            return torch.rand(2, 3, 8, 8), 2.0

    client = RolloutClient("http://127.0.0.1:1", patience=0)
    with StatusReporter(client, tiny_config("iterations=2"), Source, clock=lambda: now[0]) as reporter:
        for _ in range(70):
            for act in (lambda: None, lambda: reporter.show(0, samples())):
                act()
                idle = Event()
                reporter._work.put(idle.set)
                idle.wait()
            now[0] += 10.0
    assert asked[:4] == [0.0, 207.0, 414.0, 481.0]


def test_sixteen_rewards_can_be_told_and_folders_by_their_names_alone(tmp_path: Path) -> None:
    names = [f"reward{i}" for i in range(16)]
    rewards = dict.fromkeys(["weighted sum", *names], Estimate(mean=0.5, low=0.4, high=0.6))
    assert isinstance(HeldOutRecord(1, 8, rewards).message(), HeldOut)
    assert len(run_settings(tiny_config(f"rewards=[{', '.join(names)}]")).trained) == 16
    for name in ("my-model", "my-prompts"):
        (tmp_path / name).mkdir()
    own = {"model": str(tmp_path / "my-model"), "prompts": str(tmp_path / "my-prompts"), "output": tmp_path / "runs"}
    told = run_settings(tiny_config(**own))
    assert isinstance(told, RunSettings)
    assert (told.values["model"], told.values["prompts"]) == ("my-model", "./my-prompts")
    assert str(tmp_path) not in told.model_dump_json()
