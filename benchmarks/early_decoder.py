"""Closeness and time of early decoders: `python benchmarks/early_decoder.py [--models mini-sana …]`.

Early decoders are fitted on training prompts at half the size of the miniatures' images; closeness is measured on
held-out prompts. `--device cuda` measures the times of both decoders at true shapes instead, with random weights.
`plan_fidelity.py` measures ranks. Writes docs/results/early_decoder.json, or on a GPU early_decoder_times.json.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from plan_fidelity import fit_early, held_out
from plan_fidelity_table import TRUE_STEPS
from rank_tables import MODELS, REWARDS
from solrl_core.early_decoder import early_psnr, early_stage
from solrl_core.families import load_backbone
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import randomize
from solrl_core.generator import Generator, decode_in_batches
from solrl_proto.rollouts import Decoding, EarlyDecoder
from solrl_trainer.presets import resolve
from true_size import early_decoder, skeleton

FAMILIES = ("flux", "sd3", "sana")
IMAGES, ROUNDS = 96, 5
"""Images decoded in a round, and rounds of each decoder, in turns."""

Row = dict[str, Any]


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--device", default="cpu", help="cuda: times at true shapes")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    if args.device == "cpu":
        name, rows = "early_decoder", [of_miniature(model) for model in args.models]
    else:
        name, rows = "early_decoder_times", [at_true_shape(family, args.device) for family in FAMILIES]
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rows, indent=1)
    (args.out / f"{name}.json").write_text(text + "\n")
    print(text)


def of_miniature(model: str) -> Row:
    """Fit an early decoder to a miniature; its closeness on images of held-out prompts, in dB, and its time."""
    backbone = load_backbone(model)
    generator = Generator(backbone, "bf16")
    early = fit_early(backbone, generator, resolve(f"{model}/sol_rl/{REWARDS[0]}").config)
    texts = [prompt.text for prompt in held_out(IMAGES)]
    latents = generator.generate(texts, range(IMAGES), steps=TRUE_STEPS, decode=False).latents
    return {"model": model, "psnr": early_psnr(backbone, early, latents), **times(backbone, early, latents)}


def at_true_shape(family: str, device: str) -> Row:
    """Times of a large model's decoder, compiled as in a service, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        backbone = skeleton(family, Path(folder), device)
        early = early_decoder(backbone)
        randomize(backbone.parts["vae"], device)
        backbone.compile_decoder()
        latents = torch.randn(IMAGES, *backbone.latent_shape, device=device)
        found = times(backbone, early, latents)
    return {"family": family, "device": torch.cuda.get_device_name(), "side": early_stage(backbone).height, **found}


def times(backbone: PipelineBackbone, early: EarlyDecoder, latents: torch.Tensor) -> Row:
    """Median seconds of both decoders for all latents, measured in turns, and the share of the time saved."""

    def timed(decode: Callable[[], torch.Tensor]) -> float:
        started = time.perf_counter()
        decode().sum().item()
        return time.perf_counter() - started

    ways: dict[str, EarlyDecoder | None] = {"whole": None, "early": early}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, by in ways.items():
            seconds[name].append(timed(lambda by=by: decode_in_batches(backbone, latents, decoding=Decoding(by))))  # type: ignore[misc]
    whole, soon = (statistics.median(seconds[name][1:]) for name in ways)
    return {"images": len(latents), "whole_s": whole, "early_s": soon, "saved": 1 - soon / whole}


if __name__ == "__main__":
    main()
