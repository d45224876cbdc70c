"""`solrl-train runs`, and a run's checks of its service before loading."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from solrl_core.families import Backbone
from solrl_core.lora import adapter_layout
from solrl_proto.problems import ProblemError
from solrl_trainer.__main__ import main
from solrl_trainer.commands.preflight import check_run
from solrl_trainer.settings.presets import resolve
from tests.support.ports import free_port
from tests.support.service_helpers import RunningService, adapter_file
from tests.support.typed import accepted, refused, typed


@pytest.fixture
def first(small_service: RunningService, loaded: Backbone) -> Iterator[str]:
    layout = adapter_layout(loaded.transformer, loaded.lora_targets)
    for version in (0, 1):
        parent = version - 1 if version else None
        stored = small_service.push("first", version, adapter_file(layout, version), parent=parent)
        stored.raise_for_status()
    yield "first"
    small_service.client.delete("/v1/runs/first")


def test_runs_are_listed_and_deleted_but_no_unknown_one(small_service: RunningService, first: str) -> None:
    url = ("--rollout-url", small_service.url)
    listed = accepted(main, "runs", "list", *url)
    (row,) = (line.split() for line in listed.stdout.splitlines() if line.startswith("first"))
    assert row[:4] == ["first", "mini-sana", "1", "2"]
    assert listed.stderr.startswith("1 runs, ")
    errors = refused(main, "runs", "delete", "frist", *url)
    assert "you have no run 'frist' at the service" in errors
    assert "(did you mean 'first'?)" in errors
    assert accepted(main, "runs", "list", *url).stdout == listed.stdout
    deleted = accepted(main, "runs", "delete", first, *url).stdout
    assert deleted == "deleted first with 2 versions, the newest 1\n"
    left = accepted(main, "runs", "list", *url)
    assert (left.stdout, left.stderr) == ("", "0 runs, 0.0 MiB\n")


@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
def test_a_used_name_is_reported_before_loading(
    small_service: RunningService, first: str, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    words = ("run", "--run", first, "--output", str(tmp_path / "run"), "--rollout-url", small_service.url)
    errors = refused(main, *words, *extra)
    assert "has another run 'first', whose head is version 1" in errors
    advice = f"solrl-train runs delete first --rollout-url {small_service.url}"
    assert advice in errors
    assert "loading" not in errors
    accepted(main, *advice.split()[1:])
    assert accepted(main, *words, "--dry-run").stderr == ""


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("served_as=another", "does not host 'another'"),
        ("rewards=hpsv2", "does not score hpsv2; got ['hpsv2']; expected ['clipscore']; start the service with --rew"),
    ],
)
@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
def test_a_service_that_cannot_serve_the_run_is_reported_before_loading(
    small_service: RunningService, tmp_path: Path, setting: str, fault: str, extra: tuple[str, ...]
) -> None:
    words = ("run", "--output", str(tmp_path / "run"), "--rollout-url", small_service.url, "--set", setting)
    errors = refused(main, *words, *extra)
    assert fault in errors
    assert "loading" not in errors


def test_a_service_that_cannot_be_reached_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rollout URL" in refused(main, "runs", "list", "--rollout-url", "not-an-address")
    assert typed(main, "runs").returncode != 0
    monkeypatch.setattr("solrl_trainer.commands.preflight.FIRST_PATIENCE", 0.1)
    url = f"http://127.0.0.1:{free_port()}"
    said = refused(main, "run", "--rollout-url", url, "--output", str(tmp_path / "run"))
    assert f"no answer from {url} after 1 try" in said
    assert "solrl-rollout serve" in said
    # A run that is resumed knows its service, which may still load: it waits for its patience.
    run = resolve("mini-sana/fast/clipscore", arguments={"rollout_url": url, "output": tmp_path, "patience": 2}).config
    with pytest.raises(ProblemError, match=r"no answer from \S+ after \d tries"):
        check_run(run, resume=True)
