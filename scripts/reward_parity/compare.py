"""Compares our rewards with the scores of published code; run by `scripts/reward-parity`.

usage: python -m reward_parity.compare DATA TOKENIZER RESULT

Exits with 1 if the relative difference of a score exceeds 1e-4, or if a text is tokenised differently.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from solrl_core.rewards.aesthetic import Aesthetic
from solrl_core.rewards.hpsv2 import HpsV2, clean_text
from solrl_core.rewards.hpsv3 import HpsV3
from solrl_core.rewards.imagereward import ImageReward
from solrl_core.rewards.reward import Reward
from transformers import AutoTokenizer

LIMIT = 1e-4


def main(data: Path, tokenizer: Path, result: Path) -> int:
    """Compare, print and write the result."""
    reference = np.load(data / "reference.npz")
    prompts = [str(prompt) for prompt in reference["prompts"]]
    images = [reference[name] for name in reference.files if name.startswith("image_")]
    hpsv2 = HpsV2(
        checkpoint=str(data / "hpsv2/checkpoint.pt"),
        processor=str(data / "hpsv2/tokenizer"),
        vision_heads=2,
        text_heads=2,
    )
    imagereward = ImageReward(
        checkpoint=str(data / "imagereward/checkpoint.pt"),
        processor=str(data / "imagereward/tokenizer"),
        vision_heads=2,
    )
    aesthetic = Aesthetic(str(data / "aesthetic/clip"), str(data / "aesthetic/head.pth"))
    hpsv3 = HpsV3(str(data / "hpsv3/checkpoint.pt"), str(data / "hpsv3/tokenizer"), dtype="float32")
    large = images[2].repeat(14, 0).repeat(14, 1)
    ours = {"hpsv2": scored(hpsv2, images, prompts), "imagereward": scored(imagereward, images, prompts)}
    rows = [
        compared("hpsv2", "hpsv2", ours["hpsv2"], reference["hpsv2"]),
        compared("hpsv2", "open_clip_torch", ours["hpsv2"], reference["open_clip"]),
        compared("imagereward", "image-reward", ours["imagereward"], reference["imagereward"]),
        compared("hpsv3", "hpsv3", scored(hpsv3, images, prompts), reference["hpsv3"]),
        compared("hpsv3", "hpsv3, of a large image", scored(hpsv3, [large], prompts)[0], reference["hpsv3_large"]),
        compared("aesthetic", "open_clip_torch", scored(aesthetic, images, prompts[:1])[:, 0], reference["aesthetic"]),
    ]
    differing = differently_tokenised(tokenizer)
    passed = not differing and all(row["max_relative_difference"] <= LIMIT for row in rows)
    report = {
        "what": "reduced models of random weights on odd aspect ratios and awkward prompts, float32 on a CPU",
        "limit": LIMIT,
        "passed": passed,
        "pairs": len(images) * len(prompts),
        "image_sizes": [list(image.shape[:2]) for image in images],
        "scores": rows,
        "texts_tokenised_otherwise_with_the_whole_clip_vocabulary": differing,
        "reference_versions": json.loads(str(reference["versions"])),
        "our_versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "pillow", "ftfy")},
    }
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(report, indent=2, ensure_ascii=False))
    return 0 if passed else 1


def scored(reward: Reward, images: list[np.ndarray], prompts: list[str]) -> np.ndarray:
    """Scores of all pairs, [images, prompts]."""
    rows = []
    for image in images:
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
        rows.append(reward(pixels.expand(len(prompts), -1, -1, -1), prompts, [{}] * len(prompts)))
    return torch.stack(rows).numpy()


def compared(reward: str, package: str, ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Differences between two tables of scores, and the range of the scores."""
    apart = np.abs(ours - theirs)
    return {
        "reward": reward,
        "package": package,
        "max_relative_difference": float((apart / np.abs(theirs)).max()),
        "max_difference": float(apart.max()),
        "lowest": float(theirs.min()),
        "highest": float(theirs.max()),
        "deviation": float(theirs.std()),
    }


def differently_tokenised(folder: Path) -> list[str]:
    """Prompts whose tokens up to the end of text differ from those of hpsv2's tokeniser."""
    reference = np.load(folder / "ids.npz")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    differing = []
    for prompt, theirs in zip(reference["prompts"], reference["ids"], strict=True):
        ours = tokenizer(clean_text(str(prompt)), max_length=77, truncation=True).input_ids
        if ours != theirs[: theirs.argmax() + 1].tolist():
            differing.append(str(prompt))
    return differing


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:4])))
