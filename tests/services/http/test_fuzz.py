"""A short fuzzing of a real service by the published contract; `python benchmarks/fuzz_api.py` runs longer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "fuzz_api.py"
CONTRACT = json.loads((ROOT / "proto" / "openapi.json").read_text())
EXAMPLES = 2


@pytest.mark.slow
def test_a_short_fuzzing_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--examples", str(EXAMPLES), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "doors.json").read_text())["fuzz_api.py"]["figures"]
    asked, nothing_wrong = figures["kinds"], figures["nothing_can_be_wrong"]
    assert all(kind["asked"] >= EXAMPLES for kind in asked.values())
    routes = {f"{method.upper()} {path}" for path, methods in CONTRACT["paths"].items() for method in methods}
    assert {*asked, *nothing_wrong} == {f"{route} {mode}" for route in routes for mode in ("positive", "negative")}
    assert all(name.endswith(" negative") for name in nothing_wrong)
