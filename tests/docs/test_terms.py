"""Terms of docs/glossary.md: a page explains each where it uses it, or links the glossary before."""

import re

import pytest
from tests.docs.fences import ROOT
from tests.docs.test_commands import EVIDENCE, TASKS

GLOSSARY = "glossary.md"
TERMS = re.findall(r"\*\*([^*]+)\*\*", (ROOT / "docs" / GLOSSARY).read_text(encoding="utf-8"))
PAGES = [*TASKS, *EVIDENCE, *(f"docs/{name}.md" for name in ("checkpoints", "five-people", "monitor", "failures"))]
NEAR = 700
"""Characters from the first use of a term to its explanation."""
NOT_PROSE = re.compile(
    r"^```.*?^```$|^#[^\n]*$|`[^`]*`|!\[[^\]]*\]\([^)]*\)|(?<=\])\((?!\S*glossary)[^)]*\)", re.MULTILINE | re.DOTALL
)


def unexplained(text: str, *, linked: bool) -> list[str]:
    """Terms without explanation: in italics, in parentheses or as a link, where the page uses them first.

    With `linked`, a link to the glossary explains all terms after it.
    """
    prose = NOT_PROSE.sub(" ", text)
    if linked and GLOSSARY in prose:
        prose = prose[: prose.index(GLOSSARY)]
    return [term for term in TERMS if not _is_explained(re.escape(term).replace("-", "[- ]"), prose)]


def _is_explained(term: str, prose: str) -> bool:
    word = rf"\b[{term[0]}{term[0].upper()}]{term[1:]}(?:s|d|ly)?\b"
    used = re.search(word, prose)
    if used is None:
        return True
    near = prose[max(0, used.start() - 60) : used.end() + NEAR]
    return bool(re.search(rf"\*[^*\n]*{word}[^*\n]*\*|\[[^\]]*{word}[^\]]*\]|\({word}\)", near))


def test_the_readme_explains_its_terms_itself() -> None:
    assert unexplained((ROOT / "README.md").read_text(encoding="utf-8"), linked=False) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_explains_its_terms_or_links_the_glossary_before(page: str) -> None:
    assert unexplained((ROOT / page).read_text(encoding="utf-8"), linked=True) == []
