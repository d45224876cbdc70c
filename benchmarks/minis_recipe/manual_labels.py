"""Generated images that were looked at, to check judge and verifier.

They are images of held-out prompts, a third by each backbone, side by side on a sheet. The verdicts were written into
the list of them by hand, before judge or verifier had seen the sheet.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from solrl_core.rewards import Reward
from solrl_minis.scenes import SIDE
from solrl_proto.text_files import read_json

from minis_recipe import LOGS

SHEET = "mini-judge-looked-at.png"
LIST = LOGS / "mini-judge" / "looked_at.json"
COLUMNS = 12


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
