"""The report in a real browser."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from solrl_trainer.report.page import write_report
from tests.support.browser import FLAGS
from tests.trainer.run_folders import LONG_REWARD, PROMPTS, RESULT, SUM, finished_run, run_of_sum

LIGHT, DARK = 1, 0


@pytest.fixture
def browse(tmp_path):
    """Run chromium on a file with its own profile; returns its stdout."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("chromium is not installed; the report is tested in a real one (apt-get install chromium)")

    def run(page, *options):
        profile = tmp_path / "profile"
        command = [program, *FLAGS, f"--user-data-dir={profile}", *options, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        shutil.rmtree(profile, ignore_errors=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def report(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return write_report(finished_run(folder))


@pytest.fixture
def long_report(tmp_path):
    """A report in which everything that users name is as long as it may be."""
    folder = tmp_path / "long"
    folder.mkdir()
    run_of_sum(folder, 3)
    config = json.loads((folder / "config.json").read_text()) | {
        "rewards": SUM,
        "run": "a" * 64,
        "prompts": "/data/" + "p" * 100,
    }
    (folder / "config.json").write_text(json.dumps(config))
    gallery = json.loads((folder / "gallery.json").read_text())
    gallery["prompts"] = ["x" * 300, *gallery["prompts"][1:]]
    for pair in gallery["pairs"]:
        pair["prompt"] = "y" * 300
    (folder / "gallery.json").write_text(json.dumps(gallery))
    return write_report(folder)


# Measures the page inside a frame, since not every build of the browser has windows as narrow as a phone.
PROBE = """<!doctype html><iframe width="{width}" height="900" srcdoc="{page}"></iframe><pre id="out"></pre>
<script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, seen = [...page.images];
  const words = [...page.querySelectorAll(".under")].map(box => {{
    const range = page.createRange();
    range.selectNodeContents(box);
    return range.getBoundingClientRect();
  }}).filter(box => box.width);
  document.getElementById("out").textContent = JSON.stringify({{
    width: page.documentElement.clientWidth,
    reach: page.documentElement.scrollWidth,
    images: seen.length,
    broken: seen.filter(image => !image.naturalWidth).length,
    scripts: page.scripts.length,
    cut: [...page.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth).length,
    charts: [...page.querySelectorAll(".chart svg")].map(
      chart => chart.getBoundingClientRect().width).filter(width => width),
    smallest: Math.min(...[...page.querySelectorAll(".chart text")].map(
      label => label.getBoundingClientRect().height).filter(height => height)),
    text: page.body.innerText,
    spilled: [...page.querySelectorAll(".card, .under")].filter(box => box.scrollWidth > box.clientWidth).length,
    touching: words.filter(a => words.some(b => a !== b && a.top < b.bottom && b.top < a.bottom &&
      b.left >= a.left && b.left - a.right < 4)).length,
  }});
}};
</script>"""


def seen_in(browse, report, tmp_path, width):
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(width=width, page=html.escape(report.read_text())))
    dom = browse(probe, "--dump-dom", "--virtual-time-budget=5000", "--window-size=1500,1000")
    seen = json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', dom, re.S).group(1)))
    assert seen["reach"] <= seen["width"] == width, "the page scrolls sideways"
    assert seen["cut"] == 0, "a table is cut"
    assert seen["spilled"] == 0, "a text leaves its box"
    assert seen["touching"] == 0, "texts of neighbours touch"
    return seen


@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_fits_and_shows_everything(browse, report, tmp_path, width):
    seen = seen_in(browse, report, tmp_path, width)
    assert seen["images"] == 2 * len(PROMPTS) + 4
    assert seen["broken"] == 0
    assert seen["scripts"] == 0
    assert len(seen["charts"]) == 6
    assert min(seen["charts"]) >= 0.6 * min(width, 420)
    assert seen["smallest"] >= 11
    for part in ("48.2 %", "67.3 %", "Before and after", "<script>alert", "Adapter lineage", "learning_rate"):
        assert part in seen["text"]


@pytest.mark.parametrize("width", [1440, 1100, 700])
def test_long_values_stay_in_their_boxes(browse, tmp_path, width):
    folder = tmp_path / "run"
    folder.mkdir()
    finished_run(folder)
    undecided = {"before": 0.482, "after": 0.493, "gain": 0.011, "low": -0.1453, "high": 0.1364}
    rewards = dict.fromkeys(("clipscore", "verifier", "verifier_graded", "judge"), undecided)
    (folder / "result.json").write_text(json.dumps(RESULT | {"rewards": rewards}))
    texts = json.loads((folder / "gallery.json").read_text())
    texts["pairs"] = [texts["pairs"][i // 3] | {"proxy": -12.3126, "true": -21.3068} for i in range(6)]
    (folder / "gallery.json").write_text(json.dumps(texts))
    images = load_file(folder / "gallery.safetensors")
    shown = {name: images[name].repeat_interleave(3, 0) for name in ("explored", "regenerated")}
    save_file(images | shown, folder / "gallery.safetensors")
    assert "undecided" in seen_in(browse, write_report(folder), tmp_path, width)["text"]


@pytest.mark.parametrize("width", [1100, 390, 360])
def test_long_names_stay_in_the_page(browse, long_report, tmp_path, width):
    assert LONG_REWARD in seen_in(browse, long_report, tmp_path, width)["text"]


@pytest.mark.parametrize(("width", "scheme", "paper"), [(1280, LIGHT, (230, 255)), (390, DARK, (0, 30))])
def test_light_and_dark_are_painted(browse, report, tmp_path, width, scheme, paper):
    shot = tmp_path / "page.png"
    options = (f"--screenshot={shot}", f"--window-size={width},1600")
    browse(report, *options, f"--blink-settings=preferredColorScheme={scheme}")
    page = np.asarray(Image.open(shot).convert("RGB"))
    assert page.shape[1] == width
    assert paper[0] <= page[2, 2].mean() <= paper[1]
    ink = np.median(page[30:60, 12:200].reshape(-1, 3), axis=0)
    assert abs(page[30:60, 12:200].astype(float) - ink).max() > 150, "the heading does not stand out"
    assert len(np.unique(page.reshape(-1, 3), axis=0)) > 200
