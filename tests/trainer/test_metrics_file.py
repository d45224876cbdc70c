"""The metrics file of a resumed run, and one that is damaged."""

import re
from pathlib import Path
from typing import Any

import pytest
from solrl_trainer.report.model_card import held_out
from solrl_trainer.report.page import write_report
from solrl_trainer.run_folder.metrics_file import MetricsFile, read_metrics
from tests.trainer.run_folders import iteration_record


def filled(path: Path) -> MetricsFile:
    metrics = MetricsFile(path)
    for version in (1, 2, 3):
        metrics.log("iteration", **iteration_record(version - 1).line())
    return metrics


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
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


DAMAGED = {
    "a number": b"7",
    "no version": b'{"event": "note"}',
    "no UTF-8": b'{"event": "iteration", "version": 2, "digest": "\xff"}',
    "a torn line": b'{"event": "iterat',
    "zeros in a line": b'{"event"' + bytes(512),
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_every_reader_names_a_damaged_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = filled(path)
    first, _, third = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join((first, line, third, b"")))
    (tmp_path / "config.json").write_text("{}")
    readers = (lambda: read_metrics(path), lambda: write_report(tmp_path), lambda: held_out(tmp_path, 3))
    for read in (*readers, metrics.lines, lambda: metrics.rewind(1), metrics.seconds):
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:2: got .*; expected a JSON object"):
            read()
    path.write_bytes(b"\n".join((first, third, line)))
    assert [one["version"] for one in read_metrics(path)] == [1, 3], "a crash may leave the last line incomplete"


def test_a_reader_of_a_missing_field_names_the_field_and_its_line(tmp_path: Path) -> None:
    filled(tmp_path / "metrics.jsonl").log("iteration", version=4)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:4: got the event 'iteration' without '\w+'; expected a"):
        write_report(tmp_path)


def test_a_full_disk_names_the_file_and_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = filled(path)
    before = path.read_bytes()
    (tmp_path / "metrics.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"^cannot write .*metrics\.jsonl\.partial: No space left .*--resume FOLDER"):
        metrics.rewind(2)
    assert path.read_bytes() == before
    path.rename(tmp_path / "kept")
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"^cannot write .*metrics\.jsonl: No space left .*--resume FOLDER"):
        metrics.log("iteration", version=4)
