"""What the demo of words shows: rows of words in the terminal, pictures where it can, and a table at the end."""

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from solrl_trainer.commands.demo_words import HANDICAP, WordsReporter, words_table
from solrl_trainer.evaluation.gallery import Gallery, save_gallery
from solrl_trainer.records.evaluations import Evaluation, Verdicts, compare, verdicts
from solrl_trainer.records.records import HeldOutRecord
from solrl_trainer.run_folder.figures import READ_RIGHT

CARD = Path(__file__).parents[2] / "minis/solrl_minis/weights/mini-text/README.md"
PROMPTS = ['"CN" in purple', '"CCXL" in blue']
BASE = Evaluation({"ocr": torch.tensor([[1.0], [0.75], [torch.nan]])}, torch.zeros(3, 3, 32, 64))
LATER = Evaluation({"ocr": torch.tensor([[1.0], [1.0]])}, torch.zeros(2, 3, 32, 64))


def test_each_version_is_a_row_of_the_same_words() -> None:
    out, read = io.StringIO(), iter([["CN", "CCXI\x1b[1m"], ["CN", "CCXL"]])
    with WordsReporter(8, out, read=lambda images: next(read)) as reporter:
        for version, found in ((0, BASE), (8, LATER)):
            record = HeldOutRecord.of(version, BASE, found, {"ocr": 1.0}, prompts=2, seeds=1)
            assert reporter.evaluated(record, found, PROMPTS)
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["asked", "CN", "CCXL", "read", "right"],
        ["untrained", "CN", "✓", "CCXI…", "✗", "50", "%", "of", "2"],
        ["8", "of", "8", "CN", "✓", "CCXL", "✓", "100", "%", "of", "2"],
    ]
    assert "\x1b" not in out.getvalue()


def test_the_share_that_is_read_right_is_of_the_images_that_have_the_reward() -> None:
    rows = compare(BASE, Evaluation({"ocr": torch.ones(3, 1)}, BASE.images), {"ocr": 1.0})
    assert (rows[READ_RIGHT]["before"], rows[READ_RIGHT]["after"]) == (0.5, 1.0)
    assert verdicts(BASE.first(2, 1), LATER) == Verdicts("ocr", [(True, True), (False, True)])


def test_the_curve_has_the_first_prompts_alone() -> None:
    record = HeldOutRecord.of(8, BASE, LATER, {"ocr": 1.0}, prompts=1, seeds=1)
    assert (record.images, record.rewards["ocr"].mean) == (1, 1.0)


def test_the_table_has_what_each_engine_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.zeros(2, 3, 32, 64)
    save_gallery(tmp_path, Gallery(PROMPTS, images, images))
    program = tmp_path / "tesseract"
    program.write_text("#!/bin/sh\nprintf 'CN\\n\\fCCX1\\n\\f'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(words_table({"images": 64, "rewards": {READ_RIGHT: {"before": 0.1875, "after": 0.984}}}, tmp_path))
    text = " ".join(re.sub("[│]", " ", console.export_text()).split())
    assert "RapidOCR, which gives the reward 64 18.8 % 98.4 %" in text
    assert "Tesseract, which no reward uses 2 50.0 % 50.0 %" in text


def test_the_handicap_is_that_of_the_card() -> None:
    (guided,) = re.findall(r"\| generated with guidance 3 \| 512 \| [\d.]+% \| ([\d.]+)% \|", CARD.read_text())
    assert f"{guided} %" in HANDICAP
