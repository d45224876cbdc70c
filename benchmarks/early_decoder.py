"""Ranks and time of early-decoded images: `python benchmarks/early_decoder.py [--models mini-sana …]`.

Early decoders are fitted on training prompts at half the size of the miniatures' images. At one plan (emulated NVFP4,
six Euler steps, unpruned or pruned to half after the third step), the same candidates are scored decoded whole and
early, and compared with BF16 at ten steps, decoded whole, over held-out prompts. `--device cuda` measures the times of
both decoders at true shapes instead, with random weights. Writes docs/results/early_decoder.{json,md}, or on a GPU
early_decoder_times.json.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from plan_fidelity import REWARDS, STEPS, TRUE_STEPS, held_out, pruned, ranks, worse_than
from rich.console import Console
from rich.progress import track
from solrl_core.early_decoder import early_psnr, early_stage, fit_early_decoder, scaled_by_area
from solrl_core.families import load_backbone
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import randomize
from solrl_core.generator import Generator, decode_in_batches
from solrl_core.rewards import RewardSet
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import EarlyDecoder, PromptItem
from solrl_trainer.calibration.fitting import recipe_examples
from solrl_trainer.presets import resolve
from true_size import early_decoder, skeleton

MODELS = ("mini-sana", "mini-sd3", "mini-flux")
FAMILIES = ("flux", "sd3", "sana")
AFTER = STEPS // 2
IMAGES, ROUNDS = 96, 5
"""Images decoded in a round, and rounds of each decoder, in turns."""

Row = dict[str, Any]
WAYS: Mapping[str, tuple[str, str]] = {
    "whole": ("whole", "whole"),
    "early for pruning": ("early", "whole"),
    "early": ("early", "early"),
    "smaller": ("smaller", "smaller"),
}
"""How a plan decodes the images that it scores: (halfway, at the end)."""


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--device", default="cpu", help="cuda: times at true shapes")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device != "cpu":
        rows = [times_at_true_shape(family, args.device) for family in FAMILIES]
        (args.out / "early_decoder_times.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows, indent=1))
        return
    prompts = held_out(args.prompts)
    models = [measure(model, prompts, args.candidates) for model in args.models]
    result = {"prompts": args.prompts, "candidates": args.candidates, "models": models}
    (args.out / "early_decoder.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(models, args.prompts, args.candidates)
    (args.out / "early_decoder.md").write_text(text)
    print(text)


def measure(model: str, prompts: Sequence[PromptItem], candidates: int) -> Row:
    """Fit an early decoder to a miniature; its closeness, times, and a row of ranks per reward and way of decoding."""
    backbone = load_backbone(model)
    rewards = RewardSet.load(REWARDS, backbone)
    true, proxy = Generator(backbone, "bf16"), Generator(backbone, "nvfp4")
    latents = recipe_examples(resolve(f"{model}/sol_rl/{REWARDS[0]}").config, true).latents[-1]
    early = fit_early_decoder(backbone, latents, least=backbone.height // 2)
    groups = [
        score(prompt, expand_seeds(0, prompt.id, candidates), true, proxy, rewards, early)
        for prompt in track(prompts, f"{model}, groups", console=Console(stderr=True))
    ]
    scores = {name: torch.stack([group[name] for group in groups]) for name in groups[0]}
    new = true.generate(prompts[0].text, range(candidates), steps=TRUE_STEPS, decode=False).latents
    return {
        "model": model,
        "psnr": early_psnr(backbone, early, new),
        **times(backbone, early, new),
        "ranks": list(judge(scores, candidates // 2)),
    }


def score(
    prompt: PromptItem,
    seeds: Sequence[int],
    true: Generator,
    proxy: Generator,
    rewards: RewardSet,
    early: EarlyDecoder,
) -> dict[str, torch.Tensor]:
    """Scores [rewards, candidates] of a group: "true"; "whole/3", "early/3" and "smaller/3" after three steps."""

    def scored(images: torch.Tensor) -> torch.Tensor:
        each = rewards.score(REWARDS, images, [prompt.text] * len(seeds), [prompt.metadata] * len(seeds))
        return torch.stack([each[name] for name in REWARDS])

    found = {"true": scored(true.generate(prompt.text, seeds, steps=TRUE_STEPS).images)}
    trajectory = None
    for until in (AFTER, STEPS):
        made = proxy.generate(prompt.text, seeds, steps=STEPS, start=trajectory, until=until)
        trajectory = made.trajectory
        found[f"whole/{until}"] = scored(made.images)
        images = proxy.decode(made.latents, early=early)
        found[f"early/{until}"] = scored(images)
        found[f"smaller/{until}"] = scored(scaled_by_area(made.images, *images.shape[-2:]))
    return found


def judge(scores: Mapping[str, torch.Tensor], keep: int) -> Iterator[Row]:
    """A row per reward, for the plan with and without pruning, and way of decoding."""
    for at, reward in enumerate(REWARDS):
        each = {name: values[:, at] for name, values in scores.items()}
        for prunes in (False, True):
            whole = None
            for way, (halfway, final) in WAYS.items():
                if halfway != final and not prunes:
                    continue
                ends = each[f"{final}/{STEPS}"]
                if prunes:
                    pairs = zip(each[f"{halfway}/{AFTER}"], ends, strict=True)
                    ends = torch.stack([pruned(half, end, keep) for half, end in pairs])
                found = ranks(ends, each["true"])
                whole = whole or found
                yield {
                    "reward": reward,
                    "pruned": prunes,
                    "decoded": way,
                    "spearman": float(found["spearman"].nanmean()),
                    "top_rank": float(found["top"].mean()),
                    "bottom_rank": float(found["bottom"].mean()),
                    "worse": worse_than(whole, found),
                }


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
            seconds[name].append(timed(lambda by=by: decode_in_batches(backbone, latents, early=by)))  # type: ignore[misc]
    whole, soon = (statistics.median(seconds[name][1:]) for name in ways)
    return {"images": len(latents), "whole_s": whole, "early_s": soon, "saved": 1 - soon / whole}


def times_at_true_shape(family: str, device: str) -> Row:
    """Times of a large model's decoder, compiled as in a service, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        backbone = skeleton(family, Path(folder), device)
        early = early_decoder(backbone)
        randomize(backbone.parts["vae"], device)
        backbone.compile_decoder()
        latents = torch.randn(IMAGES, *backbone.latent_shape, device=device)
        found = times(backbone, early, latents)
    return {"family": family, "device": torch.cuda.get_device_name(), "side": early_stage(backbone).height, **found}


def table(models: Sequence[Row], prompts: int, candidates: int) -> str:
    """Markdown tables: a row per miniature, then a row per reward, plan and way of decoding."""
    lines = [
        "# Early-decoded images",
        "",
        f"By `python benchmarks/early_decoder.py`: {prompts} held-out prompts × {candidates} candidates, emulated",
        f"NVFP4 at {STEPS} Euler steps against BF16 at {TRUE_STEPS} steps. An early decoder makes images of half the",
        "size, by a least-squares fit to the model's images of training prompts. Worse: increase of the mean true rank",
        "of the 12 candidates selected as best (worst) over the same plan decoded whole, paired over prompts, with its",
        "95 % interval. Smaller: decoded whole, then scaled down to that size, so that only the size differs.",
        "",
        "| model | PSNR, dB | decoder's time saved |",
        "|---|---|---|",
        *(f"| {m['model']} | {m['psnr']:.1f} | {m['saved']:.0%} |" for m in models),
        "",
        "| model | reward | plan | decoded | Spearman | true ranks | best 12 worse | worst 12 worse |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in models:
        for row in model["ranks"]:
            plan = f"after {AFTER} keep {candidates // 2}" if row["pruned"] else "unpruned"
            first = row["decoded"] == "whole"
            worse = ["" if first else f"{m:+.2f} [{a:+.2f}, {b:+.2f}]" for m, a, b in row["worse"].values()]
            lines.append(
                f"| {model['model']} | {row['reward']} | {plan} | {row['decoded']} | {row['spearman']:.3f} "
                f"| {row['top_rank']:.1f} / {row['bottom_rank']:.1f} | {worse[0]} | {worse[1]} |"
            )
    lines += ["", "Spearman is over the candidates that were not pruned, so it is not comparable between plans."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
