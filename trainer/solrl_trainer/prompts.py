"""Prompt sets in the usual formats: `train.txt`/`test.txt`, or GenEval's `*_metadata.jsonl`."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from solrl_core.registry import FolderRegistry
from solrl_proto.rollouts import PromptItem

PROMPTS = FolderRegistry(
    "prompts", "solrl.prompts", others=("package.module:attribute", "a folder with train/test files")
)


def find_prompts(name: str) -> Path:
    """Folder of a prompt set: a registered name, or the path of a folder.

    Raises:
        ValueError: neither.
    """
    return Path(PROMPTS.locate(name))


def read_prompts(folder: Path, split: str) -> list[PromptItem]:
    """Read `<split>_metadata.jsonl` if it exists, otherwise `<split>.txt`, with one prompt per line.

    A prompt's id is a digest of its text, so that its seeds do not depend on its position in the file.

    Raises:
        ValueError: neither file exists, the file has no prompt, or a line is invalid (the error names it).
    """
    lines, text = folder / f"{split}_metadata.jsonl", folder / f"{split}.txt"
    items: dict[str, PromptItem] = {}
    if lines.is_file():
        for number, line in enumerate(lines.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                try:
                    fields: dict[str, Any] = json.loads(line)
                    item = _item(str(fields.pop("prompt")), fields)
                except (ValueError, KeyError, AttributeError, TypeError) as error:
                    raise ValueError(
                        f"{lines}:{number}: expected a JSON object with a 'prompt' of 1 to 4096 characters, "
                        f"got {line[:80]!r}"
                    ) from error
                items.setdefault(item.text, item)
    elif text.is_file():
        for number, line in enumerate(text.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                try:
                    items.setdefault(line.strip(), _item(line.strip(), {}))
                except ValueError as error:
                    raise ValueError(
                        f"{text}:{number}: expected a prompt of at most 4096 characters, got {line[:80]!r}…"
                    ) from error
    else:
        raise ValueError(f"{folder} has neither {lines.name} nor {text.name}; expected one of them")
    if not items:
        raise ValueError(f"{folder}: the {split} prompts are empty")
    return list(items.values())


def _item(prompt: str, metadata: dict[str, Any]) -> PromptItem:
    digest = hashlib.sha256(prompt.encode()).hexdigest()[:16]
    return PromptItem(id=digest, text=prompt, metadata=metadata)


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
