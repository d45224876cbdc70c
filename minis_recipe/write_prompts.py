"""Writes the prompt files of the shapes world: `python -m minis_recipe.write_prompts FOLDER`."""

import argparse
import json
from pathlib import Path

from minis_recipe.world import sample_prompts

TRAIN, TEST = 1024, 128


def write(folder: Path) -> None:
    """Write the train and test prompts, as GenEval metadata and as plain text; test combinations are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", TRAIN), ("test", TEST)):
        prompts = sample_prompts(split == "test", count, seed=0)
        lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
        (folder / f"{split}_metadata.jsonl").write_text(lines, encoding="utf-8")
        (folder / f"{split}.txt").write_text("".join(p["prompt"] + "\n" for p in prompts), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
