"""Figures of the demo: read from finished runs, and as README quotes them."""

import json
import re
from pathlib import Path

import pytest
from demo_figures import page, row
from solrl_trainer.commands.demo import demo_config, plan_file

ROOT = Path(__file__).parents[2]
WITHIN = 0.01
"""BF16 rounds differently on other processor types, which changes fitted weights."""
RECORDED = json.loads((ROOT / "docs/results/demo.json").read_text())


def finished(folder: Path, *overrides: str) -> Path:
    """A demo's folder, with the figures of a recorded run."""
    folder.mkdir()
    arguments = {"output": folder, "run": "demo", "seed": 7, "rollout_url": "http://127.0.0.1:1234"}
    config = demo_config(overrides, arguments)
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "result.json").write_text(json.dumps(RECORDED["runs"][0]))
    lines = [
        {"event": "iteration", "version": 5, "precision": "bf16", "numerics": "native"},
        {"event": "iteration", "version": 6, "precision": "nvfp4", "numerics": "emulated"},
        {"event": "evaluation", "version": 6, "rewards": {}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_read_without_its_paths(tmp_path: Path) -> None:
    found = row(finished(tmp_path / "run"))
    assert found == RECORDED["runs"][0] | {"seed": 7}
    assert found["explored_in"] == "NVFP4 (emulated)"
    assert str(tmp_path) not in json.dumps(found)


def test_the_stored_page_is_that_of_the_stored_figures() -> None:
    assert (ROOT / "docs/results/demo.md").read_text() == page(RECORDED)
    assert [one["seed"] for one in RECORDED["runs"]] == [1, 2, 42]


def test_readme_quotes_the_stored_figures() -> None:
    def span(values: list[float], digits: int) -> tuple[str, str]:
        return f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"

    def rewards(name: str, figure: str) -> list[float]:
        return [one["rewards"][name][figure] for one in RECORDED["runs"]]

    readme = " ".join((ROOT / "README.md").read_text().split())
    results = (ROOT / "docs/results/README.md").read_text()
    points = [100 * gain for gain in rewards("verifier", "gain")]
    (before,) = {f"{100 * share:.0f}" for share in rewards("verifier", "before")}
    low, high = span(points, 0)
    assert f"rises from {before} % by [{low} to {high} points](docs/results/demo.md)" in readme
    low, high = span(points, 1)
    assert f"strict accuracy +{low} to +{high} points" in results
    low, high = span(rewards("clipscore", "gain"), 3)
    assert f"clipscore +{low} to +{high}" in results
    seconds = [one["seconds"]["total"] for one in RECORDED["runs"]]
    assert {f"{one / 60:.0f}" for one in seconds} == set(re.findall(r"takes about (\d) minutes", readme))


@pytest.mark.release
@pytest.mark.slow
def test_the_shipped_plan_is_fitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import demo_plan

    monkeypatch.setattr(demo_plan, "plan_file", lambda: tmp_path / "plan.json")
    demo_plan.main()
    plan, shipped = (json.loads(path.read_text())["explore"] for path in (tmp_path / "plan.json", plan_file()))
    assert plan["calibrated_for"] == shipped["calibrated_for"]
    assert plan["fitted"]["sigmas"] == shipped["fitted"]["sigmas"]
    for name in ("step_coeffs", "x0_coeffs"):
        for fitted, stored in zip(plan["fitted"][name], shipped["fitted"][name], strict=True):
            assert fitted == pytest.approx(stored, abs=WITHIN), name
