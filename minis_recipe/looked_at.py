"""Generated images that were looked at, to check judge and verifier: `python -m minis_recipe.looked_at`.

The command draws a sheet of images of held-out prompts, a third by each backbone, and a list of its images in the order
of reading. Verdicts are then written into the list by hand, before judge or verifier has seen the sheet.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from solrl_core.rewards import Reward
from solrl_minis.catalog import WEIGHTS
from solrl_minis.scenes import SIDE
from solrl_proto.noise import expand_seeds
from solrl_proto.text_files import read_json

from minis_recipe import LOGS, measure, preference

SHEET = "mini-judge-looked-at.png"
LIST = LOGS / "mini-judge" / "looked_at.json"
COLUMNS = 12
_EACH = 32
_SEED_ROOT = 2


def draw(pictures: Path, device: str) -> None:
    """Draw the sheet and the list, every verdict in which is null."""
    folders = preference.backbones(WEIGHTS)
    rows: list[dict[str, Any]] = []
    images = []
    for index, folder in enumerate(folders):
        items = measure.held_out()[index :: len(folders)][:_EACH]
        texts = [item["prompt"] for item in items]
        seeds = [expand_seeds(_SEED_ROOT, text, 1)[0] for text in texts]
        images.append(measure.sample(measure.load(folder, device), texts, seeds, measure.STEPS))
        rows += [{"right": None, "model": folder.name, **item} for item in items]
    pixels = preference.in_bytes(torch.cat(images)).view(-1, COLUMNS, 3, SIDE, SIDE)
    sheet = pixels.permute(0, 3, 1, 4, 2).reshape(-1, COLUMNS * SIDE, 3)
    Image.fromarray(sheet.numpy()).save(pictures / SHEET, optimize=True)
    LIST.parent.mkdir(parents=True, exist_ok=True)
    LIST.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def read(pictures: Path) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Images of the sheet, [N, 3, 64, 64] in [0, 1], and their list: metadata, model and whether each is right."""
    sheet = torch.from_numpy(np.array(Image.open(pictures / SHEET).convert("RGB")))
    images = sheet.view(-1, SIDE, COLUMNS, SIDE, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE)
    rows: list[dict[str, Any]] = read_json(LIST)
    return images.float() / 255, rows


def accepted(reward: Reward, images: torch.Tensor, rows: list[dict[str, Any]]) -> dict[str, int]:
    """Number of images, right and wrong ones by eye, that a reward of 0 or 1 accepts."""
    verdicts = reward(images, [row["prompt"] for row in rows], rows) == 1
    right = torch.tensor([row["right"] for row in rows])
    return {"right": int((verdicts & right).sum()), "wrong": int((verdicts & ~right).sum())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=Path, default=Path("docs/minis"))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    draw(options.pictures, options.device)
