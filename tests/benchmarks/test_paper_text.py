"""The table of words: from invented runs, and from images that engines read."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evidence import __main__ as evidence
from paper import words
from paper.arms import Context
from paper.experiments import RESULTS, Experiment, Programme
from paper.finished import file_of, read_finished
from paper.page import draw_words
from paper.tables import text
from paper.words import WORDS, load_images, read_words, right, save_images
from paper.worker import do
from paper_runs import PROMPTS, context_of, figures_of, finish, finish_all
from PIL import Image

PROGRAMME = Programme()
GAINS = {"diffusionnft": 0.4, "naive_scaling": 0.8, "sol_rl": 0.8, "awm": 0.8, "awm_two_stage": 0.4, "flowgrpo": 0.1}
NUMBERS = [str(number) for number in range(PROMPTS)]
"""The words of the invented prompts."""
READ = {
    "rapidocr": {"before": ["?"] * PROMPTS, "after": NUMBERS},
    "tesseract": {"before": ["?"] * PROMPTS, "after": ["?", *NUMBERS[1:]]},
}


def finished(folder: Path, **changes: Any) -> Context:
    """All runs of the table, those of a recipe with its gain."""
    return finish_all(PROGRAMME, folder, GAINS, "text", **changes)


def test_the_table_says_how_soon_and_how_well_words_are_written(tmp_path: Path) -> None:
    found = figures_of(finished(tmp_path, words=READ), "text")
    assert found is not None
    # Straight lines: twice the gain reaches every share in half of the iterations.
    assert [one["mean"] for one in found["iterations"]["Sol-RL"].values()] == [pytest.approx(2.0)] * 5
    assert found["iterations"]["AWM two-stage"]["95%"]["mean"] == pytest.approx(1.0)
    assert found["iterations"]["FlowGRPO"]["95%"] is None
    assert found["compute"]["Sol-RL"]["FLUX.1"]["mean"] < 2.0
    own, there = (found["costs"][clock]["AWM"] for clock in ("FLUX.1", "FLUX.1, its preset"))
    assert own > 0 < there != own
    assert found["variants"]["rate 0.001, Sol-RL"]["× iterations, 95%"]["mean"] == pytest.approx(2.0)
    assert found["variants"]["guidance 2, AWM"]["exact, Tesseract"]["mean"] == pytest.approx(1 - 1 / PROMPTS)
    engines = found["families"]["Sol-RL"]
    assert engines["exact, RapidOCR"]["mean"] == 1
    assert engines["exact, Tesseract"]["mean"] == pytest.approx(1 - 1 / PROMPTS)
    assert found["families"]["base"]["exact, Tesseract"] == 0


def test_words_that_nobody_read_are_not_given_and_a_missing_run_leaves_no_table(tmp_path: Path) -> None:
    context = finished(tmp_path)
    awm = text.figures(context)["families"].rows["AWM"]
    assert str(awm["exact, Tesseract"]) == "not read"
    file_of(text.arms(context)["", "FlowGRPO"].experiments[-1].name, tmp_path).unlink()
    assert figures_of(context_of(PROGRAMME, tmp_path), "text") is None


def run_on_text(folder: Path) -> Experiment:
    return text.on_text(context_of(PROGRAMME, folder)).programme.experiment("sol_rl", 1)


def test_runs_on_text_stand_beside_others_of_another_machine(tmp_path: Path) -> None:
    other, own = PROGRAMME.experiment("sol_rl", 1), run_on_text(tmp_path)
    finish(other, tmp_path, 0.5)
    finish(own, tmp_path, 0.5, machine="another machine", prompts=['"K7" in red'])
    assert len(read_finished([other, own], tmp_path)) == 2


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


def test_the_first_words_are_drawn(tmp_path: Path) -> None:
    context = finished(tmp_path)
    run = text.arms(context)["", "Sol-RL"].experiments[0]
    images = torch.rand(PROMPTS, 3, 32, 64)
    save_images(images, 1 - images, file_of(run.name, tmp_path, WORDS))
    draw_words(context, tmp_path, tmp_path)
    assert [path.name for path in (tmp_path / "paper").iterdir()] == ["text-sol-rl.png"]
    with Image.open(tmp_path / "paper/text-sol-rl.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 100


def test_evidence_says_what_the_table_has(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.png", "*.gz"))
    path = tmp_path / "results/paper.json"
    content = json.loads(path.read_text())
    content["tables"]["text"] = figures_of(finished(tmp_path, words=READ), "text")
    path.write_text(json.dumps(content))
    pages = evidence.pages(tmp_path / "results")
    assert "| FlowGRPO | 0.510 | 0.510 | not by all seeds | 100 % | 92 % |" in pages[evidence.PAGES["training.md"]]
    assert "2.00 × [2.00, 2.00]" in pages[evidence.PAGES["findings.md"]]


def test_the_readme_leads_with_the_stored_words() -> None:
    root = RESULTS.parents[1]
    assert (root / "docs/words.png").read_bytes() == (RESULTS / "paper/text-sol-rl.png").read_bytes()
    read = "exact, Tesseract"
    table = json.loads((RESULTS / "paper.json").read_text())["tables"]["text"]
    before, after = (100 * one for one in (table["families"]["base"][read], table["families"]["Sol-RL"][read]["mean"]))
    readme = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    assert f"reads {before:.0f} % of 128 words right before, and {after:.0f} % after" in readme


@pytest.mark.slow
@pytest.mark.skipif(find_spec("rapidocr") is None, reason="the extra `ocr` is not installed")
def test_a_run_on_text_leaves_its_words(tmp_path: Path) -> None:
    tiny: dict[str, Any] = {
        **{"explore.prompts": 2, "explore.candidates": 6, "explore.keep": 4, "iterations": 1, "evaluate.every": 1},
        **{"optimizer.updates": 1, "lora.rank": 2, "evaluate.prompts": 3, "evaluate.seeds": 2, "evaluate.steps": 2},
        **{"evaluate.curve_seeds": 2, "evaluate.fidelity_prompts": 0},
    }
    own = text.on_text(context_of(Programme(changes=tiny), tmp_path))
    experiment = own.programme.experiment("sol_rl", 1)
    do(experiment, tmp_path)
    before, after = load_images(file_of(experiment.name, tmp_path, WORDS), 3)
    assert before.shape == after.shape == (3, 32, 64, 3)
    assert (before != after).any()
    if shutil.which("tesseract"):
        assert read_words(read_finished([experiment], tmp_path).values(), tmp_path) == 1
