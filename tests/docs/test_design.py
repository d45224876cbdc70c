"""docs/design.md: the stops on a prompt's path are existing functions; path and terms stay short."""

import ast
import re
from pathlib import Path

import pytest
from fences import ROOT

PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
PACKAGES = ("services/solrl_rollout", "trainer/solrl_trainer")
STOPS = re.findall(r"^\d+\. `([\w/]+\.py):(\w+)`", PAGE, re.MULTILINE)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_path_has_at_most_fifteen_stops() -> None:
    assert 10 <= len(STOPS) == len(re.findall(r"^\d+\. ", section("The path of a prompt"), re.MULTILINE)) <= 15


@pytest.mark.parametrize(("file", "function"), [*STOPS, ("policy.py", "decay_and_average")])
def test_each_stop_is_an_existing_function(file: str, function: str) -> None:
    found = [ROOT / package / file for package in PACKAGES if (ROOT / package / file).is_file()]
    assert len(found) == 1, file
    assert function in functions(found[0])


def test_there_are_at_most_twenty_five_terms() -> None:
    rows = [line for line in section("Terms").splitlines() if line.startswith("|")][2:]
    assert 10 <= len(rows) <= 25


def test_the_files_on_the_page_exist() -> None:
    for name in re.findall(r"`((?:trainer|services|core|tests|proto)/[\w/.]+)`", PAGE):
        assert (ROOT / name).exists() or "NAME" in name, name
