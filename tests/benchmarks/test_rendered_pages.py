"""The stored pages are those of the stored figures."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs/results"
PAGES = (
    *("hardening", "equal_gpus", "faults", "memory", "plan_fidelity", "rank_fidelity", "rollout_phase"),
    *("run_memory", "step_time", "training_phase", "true_run", "workers"),
    *("euler/plan_fidelity", "refitted/plan_fidelity", "euler/rank_fidelity", "unprepared/rank_fidelity"),
    "family_lists/rank_fidelity",
)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_rendered_from_its_json(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = RESULTS / f"{name}.json"
    shutil.copy(stored, tmp_path)
    monkeypatch.setattr(sys, "argv", [stored.stem, "--render", "--out", str(tmp_path)])
    importlib.import_module(stored.stem).main()
    assert (tmp_path / f"{stored.stem}.md").read_text() == stored.with_suffix(".md").read_text()
    assert (tmp_path / stored.name).read_text() == stored.read_text()
