"""Commands in README and documentation: if possible they run, otherwise the real programs parse them."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from tests.docs.command_checks import check, parsed, ran
from tests.docs.fences import ROOT, blocks, commands

EXTENDING = [f"docs/extending/{name}.md" for name in ("reward", "algorithm", "family")]
TASKS = [f"docs/{name}.md" for name in ("train", "flow-grpo", "images-and-pairs", "troubleshooting", "memory", "24-gb")]
OPERATORS = [f"docs/{name}.md" for name in ("five-people", "deploy", "monitor", "failures", "scale-out")]
PAGES = ["README.md", "CONTRIBUTING.md", *TASKS, "docs/many-gpus.md", "docs/python.md", "docs/evidence/unproven.md"]
PAGES += EXTENDING
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
        program, subcommand, *rest = text.split()
        with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as end:
            parsed([program, subcommand, "--help"])
        assert not end.value.code, text
        for flag in (word for word in rest if word.startswith("--")):
            assert flag in said.getvalue(), text


def layout_commands(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    inline = re.findall(r"`(solrl-train layout [^`]+)`", text)
    typed = [line.partition("#")[0] for block in blocks(page, "sh") for line in block.text.splitlines()]
    every = [*inline, *(line for line in typed if line.startswith("solrl-train layout "))]
    return [line for line in every if not line.split()[-1].startswith("--")]  # a mention of an option


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in LINKED for line in layout_commands(page)])
def test_every_documented_layout_is_computed(page: str, line: str, examples: Path) -> None:
    assert ran(shlex.split(line)) == 0


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


EVIDENCE = ["docs/findings.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/evidence/*.md"))]
LINK = re.compile(r"\]\([^)]*\)")
NOT_COUNTED = re.compile(r"`[^`]*`|\[[^\]A-Za-z]*,[^\]A-Za-z]*\]|\d+-in-\d+|\bmini-\w+|\b[A-Z][A-Za-z]*\.?\d[\d.]*")
"""Code, intervals, and names with digits, which are no figures."""


@pytest.mark.parametrize("page", ["README.md", *TASKS, *OPERATORS, *EVIDENCE])
def test_pages_can_be_read(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert hard_to_read(text, figures=2 if page in ("README.md", *EVIDENCE) else 6) == []


def hard_to_read(text: str, figures: int = 6) -> list[str]:
    """Sentences and cells of more than 25 words, sentences of more than two links, paragraphs of more than `figures`.

    A paragraph that lists commands or tables may have any number of links.
    """
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("#", "!["))]
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    prose = "\n".join("" if line.startswith("|") else line for line in lines)
    hard = [cell for cell in cells if len(LINK.sub("]", cell).split()) > 25]
    for paragraph in re.split(r"\n\s*\n|^ *(?:-|\d+\.) ", prose, flags=re.MULTILINE):
        sentences = re.split(r"[.:?;]\**\s+| · ", paragraph)
        links = 99 if re.match(r"\*(Commands|Figures):", paragraph) else 2
        hard += [one for one in sentences if len(LINK.sub("]", one).split()) > 25 or len(LINK.findall(one)) > links]
        if len(re.findall(r"\d+(?:[.,]\d+)*", NOT_COUNTED.sub("", LINK.sub("]", paragraph)))) > figures:
            hard.append(paragraph)
    return hard
