"""The stored pages are those of the stored figures."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from demo_figures import measured, memory, page
from evidence import __main__ as evidence
from evidence.claims import figures
from evidence.formats import times
from fast import __main__ as recipes
from fast.cost import PRESETS as MODELS
from fast.cost import fast_run, hours_of_run
from fast.page import POOLED
from fast.page import figures as of_recipes
from solrl_trainer.commands.demo import SETTINGS
from solrl_trainer.run_folder.figures import READ_RIGHT
from solrl_trainer.settings.presets import resolve

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"

PAGES = (
    *("hardening", "equal_gpus", "faults", "memory", "peers", "plan_fidelity", "rank_fidelity", "rollout_phase"),
    *("run_memory", "step_time", "training_phase", "true_run", "workers"),
    *("euler/plan_fidelity", "refitted/plan_fidelity", "euler/rank_fidelity", "unprepared/rank_fidelity"),
    *("family_lists/rank_fidelity", "family_lists/unprepared/rank_fidelity"),
    "family_lists/plan_fidelity",
)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_rendered_from_its_json(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = RESULTS / f"{name}.json"
    shutil.copy(stored, tmp_path)
    monkeypatch.setattr(sys, "argv", [stored.stem, "--render", "--out", str(tmp_path)])
    importlib.import_module(stored.stem).main()
    assert (tmp_path / f"{stored.stem}.md").read_text() == stored.with_suffix(".md").read_text()
    assert (tmp_path / stored.name).read_text() == stored.read_text()


def test_the_pages_of_evidence_are_those_of_the_stored_results() -> None:
    for path, text in evidence.pages(evidence.RESULTS).items():
        assert (ROOT / path).read_text(encoding="utf-8") == text
        assert not re.search(r"[${}]\w|{{", text)


@pytest.mark.parametrize("name", evidence.PICTURES)
def test_a_picture_of_evidence_is_drawn_from_the_stored_results(name: str, tmp_path: Path) -> None:
    evidence.PICTURES[name](partial(evidence.read, evidence.RESULTS), tmp_path / name)
    assert (tmp_path / name).stat().st_size == pytest.approx((ROOT / "docs/evidence" / name).stat().st_size, rel=0.1)


@pytest.mark.parametrize(
    ("page", "file", "place", "said"),
    [
        ("findings.md", "paper", ("tables", "margin", "gap", "mean of all", "gap in scores", "mean"), "50.00 % ["),
        ("findings.md", "paper", ("tables", "plateaus", "iterations", "Sol-RL", "90%", "high"), "1.90 × [1.75, 0.50]"),
        (
            "findings.md",
            "paper",
            ("tables", "plateaus", "compute", "Sol-RL, FLUX.1, seconds", "90%", "mean"),
            "2.06] | 0.50 × [",
        ),
        ("speed.md", "fast", ("loop", "flux", "clock"), "| 0 s |"),
    ],
)
def test_another_result_gives_another_page(
    page: str, file: str, place: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    shutil.copytree(evidence.RESULTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.png", "*.gz"))
    changed = evidence.PAGES[page]
    assert said not in evidence.pages(tmp_path)[changed]
    content = json.loads((tmp_path / f"{file}.json").read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = 0.5
    (tmp_path / f"{file}.json").write_text(json.dumps(content))
    assert said in evidence.pages(tmp_path)[changed]


def test_the_page_of_recipes_is_that_of_the_stored_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(RESULTS / "fast.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fast", "confirm", "--render", "--out", str(tmp_path)])
    assert recipes.main() == 0
    assert (tmp_path / "fast.md").read_text(encoding="utf-8") == (RESULTS / "fast.md").read_text(encoding="utf-8")


CONFIRMED = of_recipes([row for row in evidence.read(RESULTS, "fast")["rows"] if row["stage"] == "confirm"])[POOLED]


def test_no_screen_had_a_seed_of_the_confirmed_runs_and_none_that_chose_had_mini_flux() -> None:
    rows = evidence.read(RESULTS, "fast")["rows"]
    screened = [row for row in rows if row["stage"].startswith("screen")]
    chose = [row for row in screened if row["stage"] != "screen 10"]  # Its runs came last, and `fast` stayed.
    assert {row["world"].split(",")[0] for row in chose} == {"mini-sana", "mini-sd3", "mini-text"}
    assert not {row["seed"] for row in screened} & {row["seed"] for row in rows if row["stage"] == "confirm"}
    assert "on mini-text, none on mini-flux" in (ROOT / "docs/findings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arm", ["fast", "12-in-12", "Sol-RL as published"])
def test_the_index_of_results_quotes_the_confirmed_figures(arm: str) -> None:
    assert times(CONFIRMED[arm]["time"]["flux"]["90%"]) in (RESULTS / "README.md").read_text(encoding="utf-8")


def test_the_readme_quotes_the_confirmed_figures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{-CONFIRMED['fast']['judge']['mean']:.2f} sd less](docs/findings.md#where-fast-is-weak)" in text
    awm = evidence.read(RESULTS, "paper")["tables"]["text"]["compute"]["AWM"]["FLUX.1, its preset"]["mean"]
    assert f"[on words](docs/evidence/training.md#on-words), {awm:.2f} × as fast as 24-in-24 by compute" in text
    claims = figures(partial(evidence.read, RESULTS))["fast"]
    six = claims["six_steps"]["mean"]
    words = " ".join(text.split())
    every, twelve = (f"{claims['six_over'][arm]:.1f} ×" for arm in ("all", "twelve"))
    assert f"[{six:.1f} ×](#which-recipe) as fast as a hardly tuned *24-in-24*" in words
    assert f"makes 24-in-24 {claims['all']['speed_up']['mean']:.1f} × as fast" in words
    assert f"still {every} as fast as 24-in-24 with this update, and {twelve} as fast as 12-in-12 with it" in words
    assert f"[{six:.1f} ×](docs/findings.md#a-quicker-recipe)" in text
    guide = " ".join((ROOT / "docs/train.md").read_text(encoding="utf-8").split())
    assert f"[{six:.1f} × as fast](findings.md#a-quicker-recipe)" in guide
    assert f"presets' six, it is {CONFIRMED['fast']['time']['flux']['90%']['mean']:.1f} ×" in guide
    plain = CONFIRMED["12-in-12"]["time"]["flux"]["90%"]["mean"]
    assert f"[{plain:.1f} × as fast](findings.md#a-quicker-recipe)" in guide
    kept = min(figures(partial(evidence.read, RESULTS))["fast"]["fast"]["kept"])
    assert f"would have kept at least {100 * kept:.0f} % of their gains" in guide


@pytest.mark.parametrize("page", ["load.md", "hardening.md"])
def test_the_index_of_results_quotes_percentages_of_the_page(page: str) -> None:
    index, text = ((evidence.RESULTS / name).read_text(encoding="utf-8") for name in ("README.md", page))
    (line,) = re.findall(rf"^\| \[.*\]\({re.escape(page)}\).*$", index, re.MULTILINE)
    quoted = re.findall(r"([\d.]+) ?%", line)
    assert quoted
    assert set(quoted) <= set(re.findall(r"([\d.]+) ?%", text))


def readme_row(start: str) -> list[str]:
    """Cells of the README's only row that starts so, without the first."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {start}[^|]*\|(.*) \|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def test_the_readme_says_how_long_a_run_of_fast_takes() -> None:
    for shape, of_run in zip(MODELS, readme_row("H200"), strict=True):
        assert of_run == f"{hours_of_run(fast_run(shape), shape):.1f} h"


def test_the_readme_quotes_peers_own_trainers() -> None:
    rows = [row for row in evidence.read(RESULTS, "peers")["rows"] if "s" in row and row["trainer"] != "ours"]

    def span(part: str) -> str:
        ratios = [row["s"] / row["ours"] for row in rows if row["part"] == part]
        return f"{min(ratios):.1f} to {max(ratios):.1f} ×"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"take {span('sample')} as long to draw, {span('train')} to train" in text
    (compiled,) = [row["s"] / row["ours"] for row in rows if row["part"] == "sample compiled"]
    assert f"Sol-RL's takes {compiled:.2f} × as long to draw FLUX.1" in text
    passes = re.findall(r"[\d.]+ ×", (ROOT / "docs/evidence/speed.md").read_text().partition("both in BF16 |")[2][:40])
    assert f"a pass of diffusers [{min(passes)[:-2]} to {max(passes)}]" in text


@pytest.mark.parametrize("recipe", ["fast", "diffusionnft", "sol_rl"])
def test_the_guide_says_how_long_a_recipe_takes(recipe: str) -> None:
    (line,) = re.findall(
        rf"^\| `{recipe}` .* h \|$", (ROOT / "docs/train.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    changes = [] if recipe == "diffusionnft" else ["explore.precision=fp8"]

    def hours(shape: str, *more: str) -> float:
        run = resolve(f"{MODELS[shape]}/{recipe}/imagereward", overrides=[*changes, *more]).config
        return round(hours_of_run(run, shape), 1)

    small, usual = hours("flux", "explore.prompts=12"), [hours(shape) for shape in MODELS]
    assert [float(one) for one in re.findall(r"([\d.]+) h\b", line)] == [small, *usual]
    if recipe == "sol_rl":
        text = f"{usual[0]:.0f} hours for FLUX.1 with 48 prompts an iteration, {small:.0f} with the 12"
        assert text in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_guide_to_many_gpus_says_how_much_two_are_worth() -> None:
    text = (RESULTS / "equal_gpus.md").read_text(encoding="utf-8")
    of_flux, *_ = re.findall(r"run an iteration ([\d.]+ × as fast)", text)
    assert f"[{of_flux} as one](evidence/speed.md#hours)" in (ROOT / "docs/many-gpus.md").read_text()
    assert f"Two H200s run an iteration {of_flux} as one" in (ROOT / "docs/evidence/speed.md").read_text()


def test_a_picture_has_colours_where_css_variables_are_unknown() -> None:
    for path in (ROOT / "docs").glob("**/*.svg"):
        coloured = [one for one in ElementTree.parse(path).iter() if "var(--" in one.get("style", "")]
        for one in coloured:
            for name in re.findall(r"([a-z]+): var", one.attrib["style"]):
                assert re.fullmatch("#[0-9a-f]{6}", one.get(name, "")), (path.name, one.attrib)
        assert coloured or "var(--" not in path.read_text(encoding="utf-8"), path.name


RECORDED = json.loads((RESULTS / "demo.json").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="the demo's memory is read from /proc")
def test_the_memory_of_a_demo_includes_its_children() -> None:
    child = "kept = b'x' * 10**8; print(flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = memory(process.pid)
        process.communicate(b"\n")
    assert 10**8 < used < 2 * 10**8
    assert memory(process.pid) == 0


def test_a_demo_that_fails_has_no_figures() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        measured(["no_such_module"])


def test_the_stored_page_is_that_of_the_stored_figures() -> None:
    assert (RESULTS / "demo.md").read_text() == page(RECORDED)
    assert [run["seed"] for run in RECORDED["runs"]] == [1, 2, 42]


def test_the_figures_of_the_demo_are_of_its_settings() -> None:
    assert tuple(RECORDED["settings"]) == SETTINGS
    assert all(run["tesseract"]["after"] >= 0.85 and run["first"] >= 15 for run in RECORDED["runs"])


def test_the_index_quotes_the_stored_figures() -> None:
    def span(values: list[float], digits: int) -> tuple[str, str]:
        return f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"

    results = (RESULTS / "README.md").read_text()
    runs = RECORDED["runs"]
    assert {(one["iterations"], one["images"]) for one in runs} == {(8, 128)}
    for engine, shares in (
        ("RapidOCR", [one["rewards"][READ_RIGHT] for one in runs]),
        ("Tesseract", [one["tesseract"] for one in runs]),
    ):
        low, high = span([100 * one["after"] for one in shares], 1)
        assert f"{engine} reads {100 * shares[0]['before']:.1f} % right before, {low} to {high} % after" in results
    low, high = span([one["used"]["cpu_seconds"] for one in runs], 0)
    assert f"{low} to {high} CPU seconds and {max(one['used']['gigabytes'] for one in runs):.1f} GB" in results


def test_the_readme_shows_the_demo_of_the_default_seed() -> None:
    (default,) = [run for run in RECORDED["runs"] if run["seed"] == 42]
    before, after = (f"{100 * default['tesseract'][at]:.1f} %" for at in ("before", "after"))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{before} of words before training, {after} after" in text
