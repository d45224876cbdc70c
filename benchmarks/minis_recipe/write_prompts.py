"""Writes the prompt files of a world, shapes, words or moving.

`PYTHONPATH=benchmarks python -m minis_recipe.write_prompts shapes FOLDER`.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minis_recipe.moving import sample_movements
from minis_recipe.words import sample_words
from minis_recipe.world import sample_prompts

TRAIN, TEST = 1024, 128


def _words(held_out: bool, count: int, seed: int) -> list[dict[str, Any]]:
    return [{"prompt": word.prompt, **word.metadata} for word in sample_words(held_out, count, seed)]


WORLDS: dict[str, Callable[[bool, int, int], list[dict[str, Any]]]] = {
    "shapes": sample_prompts,
    "words": _words,
    "moving": sample_movements,
}
"""World → (whether held out, count, seed) → rows of `prompt` and metadata."""


def write(world: str, folder: Path) -> None:
    """Write the train and test prompts, with metadata and as plain text; the test prompts' contents are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", TRAIN), ("test", TEST)):
        prompts = WORLDS[world](split == "test", count, 0)
        lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
        (folder / f"{split}_metadata.jsonl").write_text(lines, encoding="utf-8")
        (folder / f"{split}.txt").write_text("".join(p["prompt"] + "\n" for p in prompts), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write(args.world, args.folder)
