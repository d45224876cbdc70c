"""The documentation site, as far as it can be checked without mkdocs: its pages, their links, the reference."""

import ast
import re
from collections.abc import Iterator
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from docs_site import BESIDE, ENTRY, on_page_markdown, site_path, with_links
from tests.docs.fences import ROOT

REPOSITORY = "https://example.org/owner/name"
PAGES = [*BESIDE, *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
REFERENCE = [entry for page in sorted(ROOT.glob("docs/reference/*.md")) for entry in ENTRY.findall(page.read_text())]
SEVERAL = re.compile(r"^ {4}[a-z]\w*(, \w+)+: ")
"""A line on several parameters or attributes."""


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without its tags."""


Loader.add_multi_constructor("", lambda loader, suffix, node: None)
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def listed(entries: list[Any]) -> Iterator[str]:
    """Pages of a part of `nav`."""
    for entry in entries:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from listed(target) if isinstance(target, list) else [target]


def test_the_navigation_lists_every_page_once() -> None:
    shown, pages = sorted(listed(CONFIG["nav"])), sorted(str(site_path(page)) for page in PAGES)
    assert set(pages) - set(shown) == set(), "add them to `nav` in mkdocs.yml"
    assert shown == pages


NOISE = "core/solrl_core/sampling/noise.py"


@pytest.mark.parametrize(
    ("page", "link", "changed"),
    [
        ("README.md", "docs/api.md#errors", "api.md#errors"),
        ("README.md", "docs/evidence/ranking.md", "evidence/ranking.md"),
        ("docs/extending/reward.md", "../evidence/plans.svg", "../evidence/plans.svg"),
        ("docs/extending/reward.md", "../../CONTRIBUTING.md#style", "../contributing.md#style"),
        ("docs/design.md", f"../{NOISE}", f"{REPOSITORY}/blob/HEAD/{NOISE}"),
        ("docs/evidence/service.md", "../../deploy/rewards", f"{REPOSITORY}/tree/HEAD/deploy/rewards"),
        ("docs/design.md", "none.md", "none.md"),
        ("docs/design.md", "#terms", "#terms"),
        ("docs/design.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_a_link_leads_to_the_site_or_to_the_repository_if_there_is_one(page: str, link: str, changed: str) -> None:
    assert with_links(f"[a]({link}), ![b]({link})", page, REPOSITORY) == f"[a]({changed}), ![b]({changed})"
    assert with_links("[a](LICENSE)", "README.md", None) == f"[a]({(ROOT / 'LICENSE').as_uri()})"


def test_an_entry_of_the_reference_becomes_docstrings() -> None:
    def shown(page: str, markdown: str) -> str:
        file = SimpleNamespace(src_uri=page)
        return on_page_markdown(markdown, SimpleNamespace(file=file), SimpleNamespace(repo_url=None), None)

    entry = "- [`solrl_proto.rollouts.Plan`](../../proto/solrl_proto/rollouts.py)"
    assert shown("reference/client.md", entry).startswith("::: solrl_proto.rollouts.Plan\n")
    assert shown("results/demo.md", entry).startswith("- [`solrl_proto.rollouts.Plan`](file:")
    assert shown("api.md", "```python noise.py\n") == '```python title="noise.py"\n'


@pytest.mark.parametrize(("name", "source"), REFERENCE)
def test_an_entry_names_an_object_and_its_source(name: str, source: str) -> None:
    assert resolve_name(name) is not None
    module = ast.parse((ROOT / "docs/reference" / source).read_text(encoding="utf-8"))
    (found,) = [node for node in module.body if name.rpartition(".")[2] in defined(node)]
    if isinstance(found, ast.ClassDef | ast.FunctionDef):
        assert ast.get_docstring(found)
        several = [line for text in docstrings(found) for line in text.splitlines() if SEVERAL.match(line)]
        assert several == [], "one line for each name, or the site shows the second name as a type"


def defined(node: ast.stmt) -> set[str]:
    """Names that a statement of a module defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings of a class with its methods, or of a function."""
    for part in ast.walk(node):
        if isinstance(part, ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(part) or ""
