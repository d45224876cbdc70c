"""Fenced blocks of a Markdown page, and the commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(?P<language>\w*)[ ]*(?P<title>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"^[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string (e.g. `python my_rewards.py`) and its text."""

    page: str
    language: str
    title: str
    text: str


def blocks(page: str, language: str | None = None) -> list[Block]:
    """All blocks of a page of the repository, or those in one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [Block(page, m["language"], m["title"], m["text"]) for m in _FENCE.finditer(text)]
    return [block for block in found if language in (None, block.language)]


def example(page: str) -> Block:
    """The page's first complete example file."""
    return next(block for block in blocks(page, "python") if block.title)


def commands(block: Block) -> list[list[str]]:
    """Commands of a shell block as words, without comments, line continuations and leading variables."""
    lines = block.text.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    for words in split:
        while words and _VARIABLE.match(words[0]):
            del words[0]
    return [words for words in split if words]
