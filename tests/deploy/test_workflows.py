"""GitHub's workflows: they fit the schema, and run commands of the repository."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
WORKFLOWS: dict[str, dict[str, Any]] = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in FILES}


def commands(workflow: str, job: str) -> list[str]:
    return [step["run"] for step in WORKFLOWS[workflow]["jobs"][job]["steps"] if "run" in step]


def test_they_fit_the_schema(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(FILES[0].read_text(encoding="utf-8").replace("runs-on:", "runs:", 1))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, "--output-format", "json", *FILES, wrong], capture_output=True, text=True)
    assert {fault["filename"] for fault in json.loads(done.stdout)["errors"]} == {str(wrong)}, done.stdout


def test_they_run_the_checks() -> None:
    assert commands("ci", "submission") == [".ci/run", "make docs"]
    assert commands("ci", "release-check")[-1] == "make release-check"
    assert commands("site", "publish") == ["make docs"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    for target in ("docs", "release-check"):
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_site_is_published_from_the_folder_in_which_it_is_built() -> None:
    (path,) = [
        step["with"]["path"] for step in WORKFLOWS["site"]["jobs"]["publish"]["steps"] if "path" in step.get("with", {})
    ]
    assert f"\nsite_dir: {path}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_they_install_the_version_of_torch_of_the_makefile(workflow: str) -> None:
    made = re.search(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert made is not None
    assert WORKFLOWS[workflow]["env"]["TORCH"] == f"{made[1]}+cpu"
