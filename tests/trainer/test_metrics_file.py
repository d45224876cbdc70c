"""The metrics file of a resumed run."""

from pathlib import Path
from typing import Any

import pytest
from solrl_trainer.metrics import Metrics, read_metrics


def filled(path: Path) -> Metrics:
    metrics = Metrics(path)
    for version in (1, 2, 3):
        metrics.log("iteration", version=version)
    return metrics


def test_lines_beyond_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    filled(path).rewind(2)
    assert [line["version"] for line in read_metrics(path)] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_killed_while_it_drops_lines_loses_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics, write = filled(path), Path.write_text

    def half(file: Path, data: str, **options: Any) -> int:
        write(file, data[: len(data) // 2], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(KeyboardInterrupt):
            metrics.rewind(2)
    assert [line["version"] for line in read_metrics(path)] == [1, 2, 3]
    metrics.rewind(2)
    assert [line["version"] for line in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("end", [b'{"event": "pu', b"\0" * 512, b'{"event"' + b"\0" * 512])
def test_the_end_may_be_damaged(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    Metrics(path).log("iteration", version=1)
    path.write_bytes(path.read_bytes() + end)
    assert [line["event"] for line in read_metrics(path)] == ["iteration"]
