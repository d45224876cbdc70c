"""GitHub's workflow: it fits the schema, and what it runs exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github/workflows/ci.yml"


def checked(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(file)]
    return subprocess.run(command, capture_output=True, text=True)


def test_it_fits_the_schema(tmp_path: Path) -> None:
    found = checked(FILE)
    assert found.returncode == 0, found.stdout
    wrong = tmp_path / "ci.yml"
    wrong.write_text(FILE.read_text().replace("runs-on: ubuntu-24.04", "runs: ubuntu-24.04", 1))
    assert checked(wrong).returncode == 1


def test_it_runs_the_checks_of_submissions_and_of_releases() -> None:
    jobs = yaml.safe_load(FILE.read_text())["jobs"]
    last = {name: job["steps"][-1]["run"] for name, job in jobs.items()}
    assert last == {"check": ".ci/run", "release": "make release-check"}
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert re.search(r"^release-check:\n\tscripts/release-check$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_images_tools_are_installed() -> None:
    steps = yaml.safe_load(FILE.read_text())["jobs"]["release"]["steps"]
    installed = set(" ".join(step.get("run", "") for step in steps).split())
    wanted = re.search(r"apt-get install ([\w -]+)\"", (ROOT / "scripts/prove-images").read_text())
    assert wanted is not None
    # The image has tar, and Python with pip.
    assert set(wanted[1].split()) - {"tar", "python3-pip"} <= installed
