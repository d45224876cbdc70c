"""Prompt sets in the usual formats: `train.txt`/`test.txt`, or GenEval's `*_metadata.jsonl`."""

import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solrl_core.registry import FolderRegistry
from solrl_proto.rollouts import PromptItem
from solrl_proto.text_files import parse_json, read_lines

PROMPTS = FolderRegistry(
    "prompts", "solrl.prompts", others=("package.module:attribute", "a folder with train/test files")
)
_NEGATIVE = ("negative_prompt", "negative_prompts", "neg_prompt")
"""Fields of data sets whose prompts say what an image must not show."""


def find_prompts(name: str) -> Path:
    """Folder of a prompt set: a registered name, or the path of a folder.

    Raises:
        ValueError: neither.
    """
    return Path(PROMPTS.locate(name))


@dataclass(frozen=True)
class Split:
    """The prompts of one file.

    Attributes:
        path: the file.
        prompts: the prompts in the order of the file, each once. A prompt may be there again with other metadata.
        rows: number of prompts in the file.
    """

    path: Path
    prompts: tuple[PromptItem, ...]
    rows: int

    @property
    def repeated(self) -> str | None:
        """How many prompts were read and how many are left, if some repeat others."""
        merged = self.rows - len(self.prompts)
        if not merged:
            return None
        remain = f"{merged:,} repeat others and are left out: {len(self.prompts):,} remain"
        return f"{self.rows:,} prompts read from {self.path}, of which {remain}"


def read_split(folder: Path, split: str) -> Split:
    """Read `<split>_metadata.jsonl` if it exists, otherwise `<split>.txt`, with one prompt per line.

    Rows are merged if text and metadata are equal. A prompt's id is a digest of its text, and of its metadata if the
    file has the text with several, so that its seeds do not depend on its position in the file.

    Raises:
        ValueError: neither file exists, both exist with different prompts, the file has no prompt, or a line is
            invalid (the error names it).
        OSError: the file cannot be read.
    """
    lines, text = folder / f"{split}_metadata.jsonl", folder / f"{split}.txt"
    if not lines.is_file() and not text.is_file():
        raise ValueError(f"{folder} has neither {lines.name} nor {text.name}; expected one of them")
    path, row = (lines, _json_row) if lines.is_file() else (text, _text_row)
    rows = [row(line, f"{path}:{number}") for number, line in enumerate(read_lines(path), 1) if line.strip()]
    if not rows:
        raise ValueError(f"{folder}: the {split} prompts are empty")
    if path is lines and text.is_file():
        _require_equal({item.text for item in rows}, text, lines)
    unique = list({_content(item): item for item in rows}.values())
    texts = Counter(item.text for item in unique)
    prompts = [
        item if texts[item.text] == 1 else item.model_copy(update={"id": _digest(_content(item))}) for item in unique
    ]
    return Split(path, tuple(prompts), len(rows))


def read_prompts(folder: Path, split: str) -> list[PromptItem]:
    """The prompts of `read_split`, which see."""
    return list(read_split(folder, split).prompts)


def in_both(train: Split, test: Split) -> str:
    """Note about the prompts that are in both splits; empty if there are none."""
    trained = {item.text for item in train.prompts}
    both = list(dict.fromkeys(item.text for item in test.prompts if item.text in trained))
    if not both:
        return ""
    return (
        f"{len(both):,} held-out prompts are also training prompts, so their figures show what was trained on; remove "
        f"them from {train.path.name} or {test.path.name}: {both[0][:80]!r}" + (", …" if len(both) > 1 else "")
    )


def _text_row(line: str, place: str) -> PromptItem:
    try:
        return _item(line, {})
    except ValueError as error:
        raise ValueError(f"{place}: expected a prompt of at most 4096 characters, got {line[:80]!r}…") from error


def _json_row(line: str, place: str) -> PromptItem:
    fields = parse_json(line, place)
    prompt = fields.pop("prompt", None) if isinstance(fields, dict) else None
    try:
        if not isinstance(prompt, str):
            raise ValueError("no text")
        item = _item(prompt, fields)
    except ValueError as error:
        raise ValueError(
            f"{place}: expected a JSON object with a 'prompt' of 1 to 4096 characters, got {line[:80]!r}"
        ) from error
    if negative := next((name for name in _NEGATIVE if fields.get(name)), None):
        raise ValueError(
            f"{place}: got a {negative!r}, which no image would be generated with; remove it, or rename it if only "
            "rewards read it"
        )
    return item


def _require_equal(texts: set[str], path: Path, lines: Path) -> None:
    """Refuse a text file with other prompts than `lines`, which would be read in its place."""
    other = {line.strip() for line in read_lines(path) if line.strip()}
    if odd := sorted(texts ^ other):
        raise ValueError(
            f"{path} and {lines} have different prompts, and only the latter would be read; remove one of them, or "
            f"give both the same prompts (only one has {odd[0][:80]!r})"
        )


def _item(prompt: str, metadata: dict[str, Any]) -> PromptItem:
    return PromptItem(id=_digest(prompt.strip()), text=prompt, metadata=metadata)


def _content(item: PromptItem) -> str:
    return json.dumps([item.text, item.metadata], sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompts_of_iteration(prompts: list[PromptItem], count: int, seed: int, iteration: int) -> list[PromptItem]:
    """Choose the `count` prompts of an iteration. Each pass over the set is a new shuffle that depends only on `seed`.

    Raises:
        ValueError: the set has fewer than `count` prompts.
    """
    if count > len(prompts):
        raise ValueError(f"got {count} prompts per iteration; expected at most {len(prompts)}, the size of the set")
    passes = len(prompts) // count
    order = list(range(len(prompts)))
    random.Random(f"{seed}/{iteration // passes}").shuffle(order)
    start = (iteration % passes) * count
    return [prompts[i] for i in order[start : start + count]]
