"""Comparisons of runs: curves over three axes, held-out figures, and settings that differ."""

import html
import json
import re
from functools import partial
from pathlib import Path

import pytest
from run_folders import RESULT, finished_run, write_metrics
from solrl_trainer.commands.cli import main
from solrl_trainer.report.compare import AXES, write_comparison
from solrl_trainer.report.run_files import RunFiles
from solrl_trainer.settings.presets import resolve
from typed import typed


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A finished run, and one in progress with other settings."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    finished_run(first)
    write_metrics(second, 10)
    evaluation = {"event": "evaluation", "version": 10, "rewards": {"clipscore": 0.2512}}
    with (second / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evaluation) + "\n")
    arguments = {"run": "other", "iterations": 30}
    settings = ["explore.candidates=48", "rewards={clipscore: 1, hpsv2: 0.5}"]
    config = resolve("mini-sana/sol_rl/clipscore", overrides=settings, arguments=arguments).config
    (second / "config.json").write_text(config.model_dump_json())
    return [first, second]


def words(page: str) -> str:
    """Visible text of the page."""
    text = re.sub(r"<(style|title)>.*?</\1>", "", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_the_page_has_figures_and_settings_of_all_runs(runs: list[Path], tmp_path: Path) -> None:
    text = words(write_comparison(runs, tmp_path / "page.html").read_text())
    for figure in (
        "2 runs compared",
        "made-up mini-sana, sol_rl, trained on clipscore · 30 of 30 iterations, 5 min 00 s, 34 560 candidates",
        "other not finished mini-sana, sol_rl, trained on clipscore + 0.5 × hpsv2 · 10 of 30 iterations",
        "0.2412 → 0.2731 +0.0319 [+0.0281, +0.0357]",
        "0.2412 → 0.2512 at iteration 10, without an interval",
        "explore.candidates 96 48",
        'rewards {"clipscore": 1.0} {"clipscore": 1.0, "hpsv2": 0.5}',
    ):
        assert figure in text.replace("\u202f", " "), figure
    differ = text.partition("Settings that differ")[2]
    assert "explore.steps" not in differ
    assert " run " not in differ
    assert "Caution" not in text


def test_each_axis_has_a_runs_own_positions(runs: list[Path]) -> None:
    first, second = map(RunFiles.read, runs)
    iterations, seconds, candidates = (axis.positions for axis in AXES)
    assert iterations(first) == list(range(31))
    assert seconds(second) == pytest.approx([10.0 * version for version in range(11)])
    assert candidates(first)[30] == 30 * 12 * 96
    assert candidates(second)[10] == 10 * 12 * 48


def test_the_images_of_the_curves_are_named_if_the_gains_have_more(runs: list[Path], tmp_path: Path) -> None:
    assert "with the averaged weights." in words(write_comparison(runs, tmp_path / "page.html").read_text())
    for run in runs:
        path = run / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [line | ({"images": 128} if line["event"] == "evaluation" else {}) for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = words(write_comparison(runs, tmp_path / "page.html").read_text())
    assert "with the averaged weights: 128 images of the 512 above." in text


def test_a_curve_ends_where_its_run_does(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(runs, tmp_path / "page.html").read_text()
    (clipscore,) = re.findall(r"<h3>clipscore</h3><div class=\"by-iterations\">(.*?)</svg>", page, re.S)
    paths = re.findall(r'<path d="([^"]+)"[^>]*stroke: var\(--c[01]\)', clipscore)
    starts, ends = zip(*((float(path.split()[1]), float(path.split()[-2])) for path in paths[-2:]), strict=True)
    assert (ends[1] - starts[1]) / (ends[0] - starts[0]) == pytest.approx(1 / 3, rel=1e-3)
    assert "<title>30: made-up 0.2731, other 0.2512</title>" in clipscore


def changed(folder: Path, section: str = "", images: int | None = None, **values: object) -> None:
    """Change settings of a run, and the number of images of its held-out curve."""
    path, metrics = folder / "config.json", folder / "metrics.jsonl"
    config = json.loads(path.read_text())
    (config[section] if section else config).update(values)
    path.write_text(json.dumps(config))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line | ({"images": images} if images and line["event"] == "evaluation" else {}) for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def titles(page: str) -> list[str]:
    return re.findall(r"<div><h3>(.*?)</h3>", page)


def test_curves_over_other_images_have_axes_of_their_own(runs: list[Path], tmp_path: Path) -> None:
    write = partial(write_comparison, runs, tmp_path / "page.html")
    assert titles(write().read_text())[:2] == ["clipscore", "strict accuracy (verifier), %"]
    assert "Always the same prompts and seeds" in words(write().read_text())
    changed(runs[0], images=16)
    changed(runs[1], images=4)
    page = write().read_text()
    assert titles(page)[:3] == ["clipscore: images 16", "clipscore: images 4", "strict accuracy (verifier), %"]
    assert "Always the same prompts and seeds" not in words(page)
    assert "so their curves have axes of their own and cannot be compared" in words(page)
    changed(runs[1], "evaluate", images=16, steps=3)
    assert titles(write().read_text())[:2] == ["clipscore: evaluate.steps 10", "clipscore: evaluate.steps 3"]


def test_scores_of_other_sums_have_axes_of_their_own(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(runs, tmp_path / "page.html").read_text()
    scores = [f"All candidates, as explored: {kind}" for kind in ("clipscore", "clipscore + 0.5 × hpsv2")]
    assert [title for title in titles(page) if title.startswith("All")] == scores
    assert "Loss" in titles(page)
    changed(runs[1], rewards={"clipscore": 1.0})
    changed(runs[1], "algorithm", name="awm")
    page = write_comparison(runs, tmp_path / "page.html").read_text()
    assert "All candidates, as explored" in titles(page)
    assert [title for title in titles(page) if title.startswith("Loss")] == ["Loss: diffusionnft", "Loss: awm"]


def test_gains_of_other_sums_are_not_rows_of_one_reward(tmp_path: Path) -> None:
    weights = [{"clipscore": 1.0, "hpsv2": 1.0}, {"clipscore": 1.0, "hpsv2": 0.5}]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, trained in zip(folders, weights, strict=True):
        folder.mkdir()
        rewards = {"weighted sum": RESULT["rewards"]["clipscore"], **RESULT["rewards"]}
        (folder / "result.json").write_text(json.dumps(RESULT | {"trained": trained, "rewards": rewards}))
    page = write_comparison(folders, tmp_path / "page.html").read_text()
    sums = re.findall(r"<h3>(weighted sum.*?)</h3>(.*?)(?=<h3>)", page, re.S)
    assert [title for title, _ in sums] == ["weighted sum: clipscore + hpsv2", "weighted sum: clipscore + 0.5 × hpsv2"]
    assert [rows.count('class="whisker') for _, rows in sums] == [1, 1]


def test_other_held_out_images_have_a_warning(runs: list[Path], tmp_path: Path) -> None:
    config = json.loads((runs[1] / "config.json").read_text())
    config["evaluate"]["steps"] = 3
    (runs[1] / "config.json").write_text(json.dumps(config))
    assert "Caution: the runs were evaluated on different" in words(
        write_comparison(runs, tmp_path / "page.html").read_text()
    )


def test_runs_of_one_name_are_told_apart_and_texts_are_escaped(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "<b>"]
    for folder in folders:
        folder.mkdir()
        finished_run(folder)
    page = write_comparison(folders, tmp_path / "page.html").read_text()
    assert f"{tmp_path}/a" in words(page)
    assert f"{tmp_path}/&lt;b&gt;" in page
    assert f"{tmp_path}/<b>" not in page
    assert "None, apart from names and folders" in words(page)


def test_runs_without_settings_or_results_can_be_compared(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for iterations, folder in enumerate(folders):
        folder.mkdir()
        write_metrics(folder, iterations)
    text = words(write_comparison(folders, tmp_path / "page.html").read_text())
    assert "None of the runs has written its result yet" in text
    (folders[0] / "result.json").write_text(json.dumps(RESULT))
    assert "+0.0319" in words(write_comparison(folders, tmp_path / "page.html").read_text())


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["first"], "got 1 runs; expected 2 to 8 folders"),
        (["first"] * 9, "got 9 runs; expected 2 to 8 folders"),
        (["first", "second/../first"], "got a folder twice"),
        (["first", "nowhere"], "nowhere contains no run"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs: list[Path], tmp_path: Path, names: list[str], fault: str) -> None:
    output = tmp_path / "page.html"
    done = typed(main, "compare", *(str(tmp_path / name) for name in names), "--output", str(output))
    assert done.returncode == 2
    assert fault in done.stderr
    assert not output.exists()
    done = typed(main, "compare", *map(str, runs), "--output", str(output))
    assert (done.returncode, done.stdout) == (0, f"{output}\n")
