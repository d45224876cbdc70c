"""The report in a real browser."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from solrl_trainer.report.page import write_report
from tests.support.browser import Browser
from tests.trainer.run_folders import LONG_REWARD, PROMPTS, RESULT, SUM, finished_run, run_of_sum

MEASURE = """(() => {
  const boxes = [...document.querySelectorAll('.under')].map((box) => {
    const range = document.createRange();
    range.selectNodeContents(box);
    return range.getBoundingClientRect();
  }).filter((box) => box.width);
  const images = [...document.images];
  const wide = (one) => one.scrollWidth > one.clientWidth;
  const sizes = (selector, side) => [...document.querySelectorAll(selector)]
    .map((one) => one.getBoundingClientRect()[side]).filter((size) => size);
  return {
    width: document.documentElement.clientWidth,
    reach: document.documentElement.scrollWidth,
    images: images.length,
    broken: images.filter((image) => !image.naturalWidth).length,
    scripts: document.scripts.length,
    cut: [...document.querySelectorAll('.scroll')].filter(wide).length,
    charts: sizes('.chart svg', 'width'),
    smallest: Math.min(...sizes('.chart text', 'height')),
    text: document.body.innerText,
    spilled: [...document.querySelectorAll('.card, .under')].filter(wide).length,
    touching: boxes.filter((a) => boxes.some((b) => a !== b && a.top < b.bottom && b.top < a.bottom
      && b.left >= a.left && b.left - a.right < 4)).length,
  };
})()"""

Look = Callable[[Path, int], dict[str, Any]]
"""Measures a report at a width in pixels; nothing in it may be cut, spill over or touch its neighbour."""


@pytest.fixture
def look(browser: Browser) -> Look:
    def look(report: Path, width: int) -> dict[str, Any]:
        with browser.page(width) as page:
            page.open(report.as_uri())
            seen: dict[str, Any] = page.see(MEASURE)
        assert seen["reach"] <= seen["width"] == width, "the page scrolls sideways"
        assert seen["cut"] == 0, "a table is cut"
        assert seen["spilled"] == 0, "a text leaves its box"
        assert seen["touching"] == 0, "texts of neighbours touch"
        return seen

    return look


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    finished_run(folder)
    return folder


@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_fits_and_shows_everything(look: Look, folder: Path, width: int) -> None:
    seen = look(write_report(folder), width)
    assert seen["images"] == 2 * len(PROMPTS) + 4
    assert seen["broken"] == 0
    assert seen["scripts"] == 0
    assert len(seen["charts"]) == 6
    assert min(seen["charts"]) >= 0.6 * min(width, 420)
    assert seen["smallest"] >= 11
    for part in ("48.2 %", "67.3 %", "Before and after", "<script>alert", "Adapter lineage", "learning_rate"):
        assert part in seen["text"]


def test_long_values_stay_in_their_boxes(look: Look, folder: Path) -> None:
    undecided = {"before": 0.482, "after": 0.493, "gain": 0.011, "low": -0.1453, "high": 0.1364}
    rewards = dict.fromkeys(("clipscore", "verifier", "verifier_graded", "judge"), undecided)
    (folder / "result.json").write_text(json.dumps(RESULT | {"rewards": rewards}))
    texts = json.loads((folder / "gallery.json").read_text())
    texts["pairs"] = [texts["pairs"][i // 3] | {"proxy": -12.3126, "true": -21.3068} for i in range(6)]
    (folder / "gallery.json").write_text(json.dumps(texts))
    images = load_file(folder / "gallery.safetensors")
    shown = {name: images[name].repeat_interleave(3, 0) for name in ("explored", "regenerated")}
    save_file(images | shown, folder / "gallery.safetensors")
    report = write_report(folder)
    for width in (1440, 1100, 700):
        assert "undecided" in look(report, width)["text"]


def test_long_names_stay_in_the_page(look: Look, tmp_path: Path) -> None:
    """Everything that users name is as long as it may be."""
    run_of_sum(tmp_path, 3)
    names = {"rewards": SUM, "run": "a" * 64, "prompts": "/data/" + "p" * 100}
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | names))
    gallery = json.loads((tmp_path / "gallery.json").read_text())
    gallery["prompts"] = ["x" * 300, *gallery["prompts"][1:]]
    for pair in gallery["pairs"]:
        pair["prompt"] = "y" * 300
    (tmp_path / "gallery.json").write_text(json.dumps(gallery))
    report = write_report(tmp_path)
    for width in (1100, 390, 360):
        assert LONG_REWARD in look(report, width)["text"]


@pytest.mark.parametrize(("width", "scheme", "paper"), [(1280, "light", (230, 255)), (390, "dark", (0, 30))])
def test_light_and_dark_paper(browser: Browser, folder: Path, width: int, scheme: str, paper: tuple[int, int]) -> None:
    with browser.page(width, 1600, scheme) as tab:
        tab.open(write_report(folder).as_uri())
        shot = base64.b64decode(tab.call("Page.captureScreenshot")["data"])
    page = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB"))
    assert page.shape[1] == width
    assert paper[0] <= page[2, 2].mean() <= paper[1]
    ink = np.median(page[30:60, 12:200].reshape(-1, 3), axis=0)
    assert abs(page[30:60, 12:200].astype(float) - ink).max() > 150, "the heading does not stand out"
    assert len(np.unique(page.reshape(-1, 3), axis=0)) > 200
