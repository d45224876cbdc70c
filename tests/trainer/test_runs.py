"""`solrl-train runs`, and a run's checks of its service before loading."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from solrl_core.families import Backbone
from solrl_core.lora import adapter_layout
from solrl_trainer.commands.cli import main
from tests.support.ports import free_port
from tests.support.service_helpers import RunningService, adapter_file
from tests.support.typed import refused, typed


@pytest.fixture
def first(small_service: RunningService, loaded: Backbone) -> Iterator[str]:
    layout = adapter_layout(loaded.transformer, loaded.lora_targets)
    for version in (0, 1):
        stored = small_service.push(
            "first", version, adapter_file(layout, version), parent=version - 1 if version else None
        )
        stored.raise_for_status()
    yield "first"
    small_service.client.delete("/v1/runs/first")


def train(small_service: RunningService, *arguments: str) -> tuple[int, str, str]:
    done = typed(main, *arguments, "--rollout-url", small_service.url)
    return done.returncode, done.stdout, done.stderr


def test_runs_are_listed_and_deleted_but_no_unknown_one(small_service: RunningService, first: str) -> None:
    code, out, errors = train(small_service, "runs", "list")
    assert code == 0, errors
    (row,) = (line.split() for line in out.splitlines() if line.startswith("first"))
    assert row[:4] == ["first", "mini-sana", "1", "2"]
    assert errors.startswith("1 runs, ")
    code, _, errors = train(small_service, "runs", "delete", "frist")
    assert code == 2
    assert "you have no run 'frist' at the service" in errors
    assert "(did you mean 'first'?)" in errors
    assert train(small_service, "runs", "list")[1] == out
    code, out, _ = train(small_service, "runs", "delete", first)
    assert (code, out) == (0, "deleted first with 2 versions, the newest 1\n")
    assert train(small_service, "runs", "list")[1:] == ("", "0 runs, 0.0 MiB\n")


@pytest.mark.parametrize("dry", [True, False])
def test_a_used_name_is_reported_before_loading(
    small_service: RunningService, first: str, tmp_path: Path, dry: bool
) -> None:
    extra = ["--dry-run"] if dry else []
    code, _, errors = train(small_service, "run", "--run", first, "--output", str(tmp_path / "run"), *extra)
    assert code == 2
    assert "has another run 'first', whose head is version 1" in errors
    advice = f"solrl-train runs delete first --rollout-url {small_service.url}"
    assert advice in errors
    assert "loading" not in errors
    assert typed(main, *advice.split()[1:]).returncode == 0
    code, _, errors = train(small_service, "run", "--run", first, "--output", str(tmp_path / "run"), "--dry-run")
    assert (code, errors) == (0, "")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["--set", "served_as=another"], "does not host 'another'"),
        (["--set", "rewards=hpsv2"], "start the service with --rewards clipscore hpsv2"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_service_that_cannot_serve_the_run_is_reported_before_loading(
    small_service: RunningService, tmp_path: Path, settings: list[str], fault: str, dry: bool
) -> None:
    extra = ["--dry-run"] if dry else []
    code, _, errors = train(small_service, "run", "--output", str(tmp_path / "run"), *settings, *extra)
    assert code == 2
    assert fault in errors
    assert "loading" not in errors


def test_a_service_that_cannot_be_reached_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rollout URL" in refused(main, "runs", "list", "--rollout-url", "not-an-address")
    assert typed(main, "runs").returncode != 0
    monkeypatch.setattr("solrl_trainer.commands.preflight.FIRST_PATIENCE", 0.1)
    url = f"http://127.0.0.1:{free_port()}"
    said = refused(main, "run", "--rollout-url", url, "--output", str(tmp_path / "run"))
    assert f"no answer from {url}" in said
    assert "solrl-rollout serve" in said
