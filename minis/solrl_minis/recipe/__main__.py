"""Train the miniatures: `python -m solrl_minis.recipe --out FOLDER [--device cuda]`.

Stages may run one by one (`--stage`): `autoencoder` first; `backbone` and `clip` need its output alone.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from diffusers import AutoencoderDC, SanaPipeline

from solrl_minis.recipe import autoencoder, backbone, clip
from solrl_minis.verifier import verify_batch
from solrl_minis.world import sample_prompts

STAGES = ("autoencoder", "backbone", "aware", "clip")


def _log(folder: Path, **figures: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    print({k: v for k, v in figures.items() if k != "losses"}, flush=True)


def _thin(losses: list[float], points: int = 200) -> list[float]:
    """Means over equal stretches, for the loss curve of the card."""
    stretch = max(1, len(losses) // points)
    parts = [losses[i : i + stretch] for i in range(0, len(losses), stretch)]
    return [round(sum(part) / len(part), 5) for part in parts]


def _accuracy(pipeline: SanaPipeline, device: str) -> dict[str, object]:
    """Strict accuracy on held-out prompts at 10 steps, over all and by kind."""
    prompts = sample_prompts(True, 640 if device == "cuda" else 16, 0)
    images = backbone.sample(pipeline.to(torch.float32), [p["prompt"] for p in prompts], 10, device)
    strict = [v.strict for v in verify_batch(images, prompts)]
    kinds: dict[str, list[float]] = {}
    for value, prompt in zip(strict, prompts, strict=True):
        kinds.setdefault(prompt["tag"], []).append(value)
    return {"strict": sum(strict) / len(strict), "kinds": {k: sum(v) / len(v) for k, v in kinds.items()}}


def main() -> None:
    """Run the stages asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--wrong-captions", type=float, default=0.35)
    parser.add_argument("--aware-seconds", type=float, default=math.inf, help="ends the aware stage early")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies steps and pools; below 1 for a trial")
    args = parser.parse_args()
    device, scale = args.device, args.scale
    large = device == "cuda"
    torch.set_float32_matmul_precision("high")

    def steps(n: int) -> int:
        return max(20, int(n * scale))

    vae = args.out / "mini-sana" / "vae"
    if args.stage in ("autoencoder", "all"):
        start = time.monotonic()
        model, losses = autoencoder.train(steps(2500), 256 if large else 32, device)
        model.to(torch.bfloat16).save_pretrained(vae)
        figures = {"psnr_db": autoencoder.psnr(model.float(), device), "seconds": time.monotonic() - start}
        _log(args.out / "autoencoder", **figures, losses=_thin(losses))
    model = AutoencoderDC.from_pretrained(vae, torch_dtype=torch.float32).to(device).eval()
    if args.stage in ("backbone", "all"):
        start = time.monotonic()
        pipeline, losses = backbone.train(
            model, steps(12_000), 1024 if large else 64, steps(200_000), args.wrong_captions, device
        )
        pipeline.to(torch.bfloat16).save_pretrained(args.out / "mini-sana")
        (args.out / "mini-sana" / "solrl.json").write_text(json.dumps(backbone.SETTINGS, indent=2) + "\n")
        _log(
            args.out / "backbone",
            **_accuracy(pipeline, device),
            wrong_captions=args.wrong_captions,
            seconds=time.monotonic() - start,
            losses=_thin(losses),
        )
    if args.stage in ("aware", "all"):
        start = time.monotonic()
        pipeline = SanaPipeline.from_pretrained(args.out / "mini-sana", torch_dtype=torch.float32)
        distances = backbone.train_aware(
            pipeline,
            steps(8000),
            512 if large else 64,
            steps(60_000),
            args.wrong_captions,
            device,
            args.aware_seconds,
        )
        pipeline.to(torch.bfloat16).save_pretrained(args.out / "mini-sana")
        _log(
            args.out / "aware",
            **_accuracy(pipeline, device),
            steps=len(distances),
            wrong_captions=args.wrong_captions,
            seconds=time.monotonic() - start,
            losses=_thin(distances),
        )
    if args.stage in ("clip", "all"):
        start = time.monotonic()
        reward, processor, losses = clip.train(
            model, steps(6000), 512 if large else 32, steps(80_000), device
        )
        reward.to(torch.bfloat16).save_pretrained(args.out / "mini-clip")
        processor.save_pretrained(args.out / "mini-clip")
        agreement = clip.agreement(reward.float(), processor.tokenizer, device)
        _log(args.out / "clip", agreement=agreement, seconds=time.monotonic() - start, losses=_thin(losses))


if __name__ == "__main__":
    main()
