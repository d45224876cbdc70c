"""The table of words: from invented runs, and from images that engines read."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paper import words
from paper.experiments import Experiment, Programme
from paper.finished import file_of, read_finished
from paper.page import draw_words
from paper.tables import TABLES, text
from paper.words import WORDS, load_images, read_words, right, save_images
from paper.worker import do
from PIL import Image
from support.paper_runs import PROMPTS, TINY, context_of, finish, finish_all

PROGRAMME = Programme()


def test_a_finished_table_draws_words_says_which_nobody_read_and_needs_every_run(tmp_path: Path) -> None:
    context = finish_all(PROGRAMME, tmp_path, "text")
    arms = text.arms(context)
    assert str(text.figures(context)["families"].rows["AWM"]["exact, Tesseract"]) == "not read"
    images = torch.rand(PROMPTS, 3, 32, 64)
    save_images(images, 1 - images, file_of(arms["", "Sol-RL"].experiments[0].name, tmp_path, WORDS))
    draw_words(context, tmp_path, tmp_path)
    (drawn,) = (tmp_path / "paper").iterdir()
    assert drawn.name == "text-sol-rl.png"
    with Image.open(drawn) as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 100
    assert TABLES["text"].stands(context)
    file_of(arms["", "FlowGRPO"].experiments[-1].name, tmp_path).unlink()
    assert not TABLES["text"].stands(context_of(PROGRAMME, tmp_path))


def run_on_text(folder: Path) -> Experiment:
    return text.on_text(context_of(PROGRAMME, folder)).programme.experiment("sol_rl", 1)


def test_both_engines_read_a_runs_images_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(run_on_text(tmp_path), tmp_path, 0.5)
    file = file_of(run_on_text(tmp_path).name, tmp_path, WORDS)
    # Images after are as light as the number of their prompt.
    images = (torch.arange(PROMPTS).view(-1, 1, 1, 1) / 255).expand(-1, 3, 32, 64)
    save_images(torch.zeros_like(images), images, file)

    def runs() -> list[Any]:
        return list(read_finished([run_on_text(tmp_path)], tmp_path).values())

    before, after = load_images(file, PROMPTS)
    assert not before.any()
    assert after[:, 31, 63, 2].tolist() == list(range(PROMPTS))

    monkeypatch.setattr(words, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert read_words(runs(), tmp_path) == 0
    assert "the words of 1 runs are not read, because tesseract is missing" in capsys.readouterr().err

    def shades(pixels: np.ndarray) -> list[str]:
        return [f" {one} \n" for one in pixels[:, 0, 0, 0]]

    monkeypatch.setattr(shutil, "which", lambda name: "tesseract")
    monkeypatch.setattr(words, "READERS", {"rapidocr": shades, "tesseract": lambda pixels: ["?"] * len(pixels)})
    assert read_words(runs(), tmp_path) == 1
    (run,) = runs()
    assert right(run, "rapidocr", "after").tolist() == [1] * PROMPTS
    assert right(run, "rapidocr", "before").tolist() == [1] + [0] * (PROMPTS - 1)
    assert not right(run, "tesseract", "after").any()
    assert read_words(runs(), tmp_path) == 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("rapidocr") is None, reason="the extra `ocr` is not installed")
def test_a_run_on_text_leaves_its_words(tmp_path: Path) -> None:
    own = text.on_text(context_of(Programme(changes=TINY | {"iterations": 1, "evaluate.curve_seeds": 2}), tmp_path))
    experiment = own.programme.experiment("sol_rl", 1)
    do(experiment, tmp_path)
    before, after = load_images(file_of(experiment.name, tmp_path, WORDS), 3)
    assert before.shape == after.shape == (3, 32, 64, 3)
    assert (before != after).any()
    if shutil.which("tesseract"):
        assert read_words(read_finished([experiment], tmp_path).values(), tmp_path) == 1
