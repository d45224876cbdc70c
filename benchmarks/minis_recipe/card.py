"""Measures the shipped miniatures for their cards: `PYTHONPATH=benchmarks python -m minis_recipe.card --only mini-sd3`.

Prints the rows of the tables in README.md next to the weights, and draws loss curves and sample grids to docs/minis/.
"""

import argparse
import os
from itertools import accumulate
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import matplotlib as mpl
import torch
from PIL import Image
from solrl_minis.catalog import WEIGHTS
from solrl_minis.judge import Judge
from solrl_minis.verifier import verifier_reward
from solrl_proto.text_files import read_json
from transformers import AutoTokenizer, CLIPModel

from minis_recipe import LOGS, autoencoder, clip, detection, manual_labels, measure, preference, reading
from minis_recipe.family import Family
from minis_recipe.files import load_autoencoder
from minis_recipe.miniatures import MINIATURES
from minis_recipe.stages import MiniBackbone, MiniJudge, MiniReward, Setup, held_out_agreement
from minis_recipe.words import LENGTHS, WordSource, sample_words

_CURVES = {
    "autoencoder": "reconstruction",
    "backbone": "flow matching",
    "aware": "relative NVFP4 error",
    "contrastive": "contrastive",
    "preference": "preference",
    "detection": "detection",
}
_JUDGED = 64
"""Prompts whose images by each backbone show how far judge and verifier agree."""


def draw_curves(name: str, out: Path) -> None:
    """Draw the loss curves, one panel per stage; runs of a stage follow one another, each from a dotted line."""
    mpl.use("svg")
    from matplotlib import pyplot

    runs = {stage: read_json(LOGS / name / f"{stage}.json")["runs"] for stage in MINIATURES[name].stages}
    losses = {stage: [loss for run in done for loss in run["losses"]] for stage, done in runs.items()}
    shown = {stage: values for stage, values in losses.items() if values}
    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.4 * len(shown), 2.8), layout="constrained", squeeze=False)
    for axis, (stage, values) in zip(axes[0], shown.items(), strict=True):
        axis.semilogy(values, linewidth=1.2)
        axis.set_title(f"{stage}: {_CURVES[stage]}", fontsize=9)
        lengths = [len(run["losses"]) for run in runs[stage]]
        for begun in [end for end in accumulate(lengths) if end < len(values)]:
            axis.axvline(begun, color="grey", linestyle=":")
            axis.annotate(" next run", (begun, 0.97), xycoords=("data", "axes fraction"), fontsize=8, va="top")
        axis.set_xlabel("progress, 1/200 of a run", fontsize=8)
        axis.set_ylabel("loss, log scale", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(out / f"{name}-losses.png", dpi=110)


def draw_grid(images: torch.Tensor, file: Path, columns: int = 12, rows: int = 6) -> None:
    """Draw a grid of the first images, one per prompt, enlarged."""
    chosen = images[:: measure.SEEDS][: columns * rows]
    grid = torch.nn.functional.pad(chosen, (2, 2, 2, 2), value=1.0)
    grid = grid.view(-1, columns, *grid.shape[1:]).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    picture = Image.fromarray((grid * 255).round().byte().permute(1, 2, 0).numpy())
    size = (picture.width * 5 // 4, picture.height * 5 // 4)
    picture.resize(size, Image.Resampling.BICUBIC).convert("P", palette=Image.Palette.ADAPTIVE).save(file)


def backbone_rows(name: str, family: Family, pictures: Path, device: str) -> list[str]:
    """Rows of a pipeline."""
    backbone = measure.load(WEIGHTS / name, device)
    figures, images = family.accuracy(backbone)
    psnr = autoencoder.psnr(load_autoencoder(WEIGHTS / name, device), device, source=family.source)
    rows = [
        f"| strict accuracy, held-out prompts, {measure.STEPS} steps, BF16 ({figures['images']} images) "
        f"| {figures['strict']:.1%} |",
        f"| graded | {figures['graded']:.3f} |",
        *(f"| — {kind.replace('_', ' ')} | {value:.1%} |" for kind, value in figures["kinds"].items()),
    ]
    if images.ndim == 5:  # the first, the middle and the last frame, side by side
        shown = torch.cat([images[:, at] for at in (0, images.shape[1] // 2, -1)], -1)
        draw_grid(shown, pictures / f"{name}-samples.png", columns=4)
    else:
        draw_grid(images, pictures / f"{name}-samples.png")
        fidelity = measure.fidelity(backbone, count=8)
        sample = f"{fidelity['prompts']} prompts × {fidelity['candidates']} candidates, {fidelity['reward']}"
        rows += [
            f"| Spearman of BF16 at 6 steps with BF16 at 10 steps ({sample}) | {fidelity['spearman_bf16']:.3f} |",
            f"| Spearman of NVFP4 at 6 steps with BF16 at 10 steps | {fidelity['spearman_nvfp4']:.3f} |",
        ]
    return [*rows, f"| autoencoder, held-out scenes | {psnr:.1f} dB |"]


def text_rows(name: str, pictures: Path, device: str) -> list[str]:
    """Rows of mini-text."""
    folder = WEIGHTS / name
    backbone, vae = measure.load(folder, device), load_autoencoder(folder, device)
    words = [word for word in sample_words(True, reading.PROMPTS, seed=0) for _ in range(measure.SEEDS)]
    drawn = WordSource(1, held_out=True).images(words, device)
    with torch.no_grad():
        restored = autoencoder.from_latents(vae, autoencoder.to_latents(vae, drawn)).clamp(0, 1)
    generated = reading.accuracy(backbone)[1]
    draw_grid(generated, pictures / f"{name}-samples.png", columns=8, rows=8)
    read = {
        "drawn, not generated": reading.right(drawn, words),
        "drawn, encoded and decoded": reading.right(restored, words),
        "generated with guidance 3": reading.right(reading.accuracy(backbone, guidance=3.0)[1], words),
        "generated": reading.right(generated, words),
    }
    for length in LENGTHS:
        rows = [len(word.text) == length for word in words]
        read[f"— {length} characters"] = {engine: hits[rows] for engine, hits in read["generated"].items()}
    groups = reading.groups(backbone, prompts=32)
    return [
        *(
            f"| {label} | {len(hits['rapidocr'])} | {hits['rapidocr'].mean():.1%} | {hits['tesseract'].mean():.1%} |"
            for label, hits in read.items()
        ),
        *(
            f"| {label} | {groups[key]:.3f} | {groups[f'{key}_best_of_24']:.3f} | {groups[f'{key}_best_of_96']:.3f} |"
            for label, key in (("share of words read right", "exact"), ("reward `ocr`", "reward"))
        ),
    ]


def reward_rows(name: str, reward: str, device: str) -> list[str]:
    """Rows of mini-clip or of a preference reward."""
    figures = held_out_agreement(Setup(WEIGHTS, device), reward)
    rows = [f"| held-out pairs, {where} | {value:.1%} |" for where, value in figures.items()]
    if name == "mini-clip":
        model = CLIPModel.from_pretrained(WEIGHTS / name, dtype=torch.float32).eval()
        right = clip.agreement(model, AutoTokenizer.from_pretrained(WEIGHTS / name), "cpu")
        rows.append(f"| held-out prompts: right image beats one that differs in one attribute | {right:.1%} |")
    return rows


def judge_rows(name: str, pictures: Path, device: str) -> list[str]:
    """Rows of the judge, each beside the verifier's."""
    judge = Judge(str(WEIGHTS / name), device=device)
    ours, theirs = (detection.accepted(reward) for reward in (judge, verifier_reward))
    rows = [f"| {kind} | {share:.1%} | {theirs[kind]:.1%} |" for kind, share in ours.items()]
    metadata = [item for item in measure.held_out(_JUDGED) for _ in range(measure.SEEDS)]
    for folder in preference.backbones(WEIGHTS):
        images = measure.accuracy(measure.load(folder, device), _JUDGED)[1]
        one, other = (reward(images, [""] * len(images), metadata) == 1 for reward in (judge, verifier_reward))
        parts = (one == other, one & other, one & ~other, other & ~one, ~one & ~other)
        rows.append(f"| {folder.name} | {' | '.join(f'{float(part.float().mean()):.1%}' for part in parts)} |")
    sheet, listed = manual_labels.read(pictures)
    eyes = [manual_labels.accepted(reward, sheet, listed) for reward in (judge, verifier_reward)]
    for kind in ("right", "wrong"):
        count = sum(row["right"] == (kind == "right") for row in listed)
        rows.append(f"| {kind} | {count} | {eyes[0][kind]} | {eyes[1][kind]} |")
    return rows


def main() -> None:
    """Measure the selected miniatures, draw their figures and print the rows of their cards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MINIATURES, default=list(MINIATURES))
    parser.add_argument("--pictures", type=Path, default=Path("docs/minis"))
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.pictures.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        match MINIATURES[name]:
            case MiniBackbone(family=family) if family.source is WordSource:
                rows = text_rows(name, args.pictures, args.device)
            case MiniBackbone(family=family):
                rows = backbone_rows(name, family, args.pictures, args.device)
            case MiniReward(kind=kind):
                rows = reward_rows(name, kind.reward, args.device)
            case MiniJudge():
                rows = judge_rows(name, args.pictures, args.device)
            case _:
                rows = reward_rows(name, "clipscore", args.device)
        draw_curves(name, args.pictures)
        print(name, *rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
