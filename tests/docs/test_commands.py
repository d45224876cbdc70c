"""Commands in README and documentation: if possible they run, otherwise the real programs parse them."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from command_checks import check, parsed
from fences import ROOT, blocks, commands

EXTENDING = [f"docs/extending/{name}.md" for name in ("reward", "algorithm", "family")]
TASKS = ["docs/train.md", "docs/troubleshooting.md"]
PAGES = ["README.md", "CONTRIBUTING.md", *TASKS, "docs/many-gpus.md", "docs/python.md", *EXTENDING]
LINKED = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
]
COMMANDS = [(page, words) for page in PAGES for block in blocks(page, "sh") for words in commands(block)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(w)[:60]}" for page, w in COMMANDS])
def test_documented_commands_are_valid(
    page: str, words: list[str], examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(examples)
    check(words)


def test_commands_within_the_text_exist() -> None:
    """`solrl-train report FOLDER` and the like: the subcommand and its flags are known."""
    inline = re.findall(r"`((?:solrl-train|solrl-rollout) [^`]+)`", (ROOT / "README.md").read_text())
    assert inline
    for text in inline:
        _, subcommand, *rest = text.split()
        usage = help_of(text.split()[0], subcommand)
        for flag in (word for word in rest if word.startswith("--")):
            assert flag in usage, text


def help_of(program: str, subcommand: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
        parsed([program, subcommand, "--help"])
    assert not end.value.code, (program, subcommand)
    return said.getvalue()


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    """Each link leads to a file or folder, and to one of its headings."""
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", (ROOT / page).read_text()):
        found = (ROOT / page).parent.joinpath(target) if target else ROOT / page
        assert found.exists(), target
        assert not heading or heading in headings(found), (target, heading)


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short() -> None:
    """Words of its text and tables, lines, and characters of a line outside of tables."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$|\]\([^)]*\)|[|-]{2,}", "", readme, flags=re.MULTILINE | re.DOTALL)
    assert 500 < len(text.replace("|", " ").split()) <= 700
    assert len(readme.splitlines()) <= 118
    assert [line for line in readme.splitlines() if len(line) > 130 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", ["README.md", *TASKS])
def test_readme_and_pages_by_task_have_short_sentences_and_cells(page: str) -> None:
    """At most 25 words each, so that nothing needs to be decoded."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "#")))
    parts = [cell for row in rows for cell in row.split("|")] + re.split(
        r"[.:?]\**\s+|\n\n|^- ", prose, flags=re.MULTILINE
    )
    assert parts
    assert [part for part in parts if len(part.split()) > 25] == []
