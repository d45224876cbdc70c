"""Train the miniatures: `python -m solrl_minis.recipe --out FOLDER [--device cuda]`.

Stages may run one by one (`--stage`): `autoencoder` first, `aware` after `backbone`; `clip` needs the autoencoder
alone. On one H200 the whole takes about 25 minutes.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderDC, SanaPipeline

from solrl_minis.recipe import autoencoder, backbone, clip
from solrl_minis.verifier import verify_batch
from solrl_minis.world import sample_prompts

WRONG_CAPTIONS, AWARE_WRONG_CAPTIONS = 0.35, 0.1
"""Shares of captions with one attribute wrong: what is left for reinforcement learning to unlearn."""


@dataclass(frozen=True)
class Setup:
    """Where the stages run and how much of them."""

    out: Path
    device: str
    scale: float
    aware_seconds: float

    @property
    def large(self) -> bool:
        """Whether batches are a GPU's."""
        return self.device == "cuda"

    def steps(self, count: int) -> int:
        """A scaled number of steps or images; with 20 steps the warm-up of 5 % would have no length."""
        return max(24, int(count * self.scale))

    def autoencoder(self) -> AutoencoderDC:
        """The autoencoder that the first stage left."""
        folder = self.out / "mini-sana" / "vae"
        return AutoencoderDC.from_pretrained(folder, torch_dtype=torch.float32).to(self.device).eval()


def train_autoencoder(setup: Setup) -> dict[str, Any]:
    """Stage 1."""
    model, losses = autoencoder.train(setup.steps(2500), 256 if setup.large else 32, setup.device)
    model.to(torch.bfloat16).save_pretrained(setup.out / "mini-sana" / "vae")
    return {"psnr_db": autoencoder.psnr(model.float(), setup.device), "losses": _thin(losses)}


def train_backbone(setup: Setup) -> dict[str, Any]:
    """Stage 2: text encoder and transformer."""
    pipeline, losses = backbone.train(
        setup.autoencoder(),
        setup.steps(12_000),
        1024 if setup.large else 64,
        setup.steps(200_000),
        WRONG_CAPTIONS,
        setup.device,
    )
    _save(pipeline, setup)
    return {**_accuracy(pipeline, setup), "wrong_captions": WRONG_CAPTIONS, "losses": _thin(losses)}


def train_aware(setup: Setup) -> dict[str, Any]:
    """Stage 3: the transformer learns to keep its course in NVFP4."""
    pipeline = SanaPipeline.from_pretrained(setup.out / "mini-sana", torch_dtype=torch.float32)
    distances = backbone.train_aware(
        pipeline,
        setup.steps(4000),
        512 if setup.large else 64,
        setup.steps(60_000),
        AWARE_WRONG_CAPTIONS,
        setup.device,
        setup.aware_seconds,
    )
    _save(pipeline, setup)
    figures = {"steps": len(distances), "wrong_captions": AWARE_WRONG_CAPTIONS}
    return {**_accuracy(pipeline, setup), **figures, "losses": _thin(distances)}


def train_clip(setup: Setup) -> dict[str, Any]:
    """Stage 4: the reward model."""
    model, processor, losses = clip.train(
        setup.autoencoder(),
        setup.steps(6000),
        512 if setup.large else 32,
        setup.steps(80_000),
        setup.device,
    )
    model.to(torch.bfloat16).save_pretrained(setup.out / "mini-clip")
    processor.save_pretrained(setup.out / "mini-clip")
    agreement = clip.agreement(model.float(), processor.tokenizer, setup.device)
    return {"agreement": agreement, "losses": _thin(losses)}


STAGES: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "autoencoder": train_autoencoder,
    "backbone": train_backbone,
    "aware": train_aware,
    "clip": train_clip,
}


def _save(pipeline: SanaPipeline, setup: Setup) -> None:
    folder = setup.out / "mini-sana"
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    (folder / "solrl.json").write_text(json.dumps(backbone.SETTINGS, indent=2) + "\n")


def _accuracy(pipeline: SanaPipeline, setup: Setup) -> dict[str, Any]:
    """Strict accuracy on held-out prompts at 10 steps, over all and by kind."""
    prompts = sample_prompts(True, 640 if setup.large else 16, 0)
    texts = [prompt["prompt"] for prompt in prompts]
    images = backbone.sample(pipeline.to(torch.float32), texts, 10, setup.device)
    kinds: dict[str, list[float]] = {}
    for verdict, prompt in zip(verify_batch(images, prompts), prompts, strict=True):
        kinds.setdefault(prompt["tag"], []).append(verdict.strict)
    every = [value for values in kinds.values() for value in values]
    return {"strict": sum(every) / len(every), "kinds": {k: sum(v) / len(v) for k, v in kinds.items()}}


def _thin(losses: list[float], points: int = 200) -> list[float]:
    """Means over equal stretches, for the loss curve of the card."""
    stretch = max(1, len(losses) // points)
    parts = [losses[i : i + stretch] for i in range(0, len(losses), stretch)]
    return [round(sum(part) / len(part), 5) for part in parts]


def main() -> None:
    """Run the stages asked for, each leaving its figures in training/<stage>.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies steps and pools; below 1 for a trial")
    parser.add_argument("--aware-seconds", type=float, default=math.inf, help="ends the aware stage early")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    setup = Setup(args.out, args.device, args.scale, args.aware_seconds)
    (args.out / "training").mkdir(parents=True, exist_ok=True)
    for name, stage in STAGES.items():
        if args.stage in (name, "all"):
            start = time.monotonic()
            figures = stage(setup)
            figures["seconds"] = time.monotonic() - start
            (args.out / "training" / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
            print(name, {k: v for k, v in figures.items() if k != "losses"}, flush=True)


if __name__ == "__main__":
    main()
