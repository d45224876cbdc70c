"""The published contract against a real service, in short; `python benchmarks/fuzz_api.py` takes its time."""

import json
import subprocess
import sys
from pathlib import Path

from solrl_rollout.access import RULES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_api.py"


def test_a_short_fuzzing_finds_nothing(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    command = [sys.executable, str(SCRIPT), "--examples", "8", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = {name.rpartition(" ")[0] for name in json.loads(out.read_text())["answers"]}
    undocumented = {f"GET {path}" for path in ("/", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")}
    assert asked == set(RULES) - undocumented
