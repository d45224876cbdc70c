"""docs/design.md: the stops on a prompt's path are existing functions, and the files that it names exist."""

import ast
import re
from pathlib import Path

import pytest
from tests.docs.fences import ROOT

PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
FOLDERS = ("proto", "core", "clients", "services", "trainer")
STOPS = re.findall(r"`(solrl_[\w/]+\.py):(\w+)`", PAGE)


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("file", "function"), STOPS)
def test_each_stop_is_an_existing_function(file: str, function: str) -> None:
    (found,) = (ROOT / folder / file for folder in FOLDERS if (ROOT / folder / file).is_file())
    assert function in functions(found)


def test_the_files_on_the_page_exist() -> None:
    for name in re.findall(r"`((?:trainer|services|core|clients|tests|proto)/[\w/.]+)`", PAGE):
        assert (ROOT / name).exists() or "NAME" in name, name
