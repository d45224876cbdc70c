"""Measures the shipped miniatures and writes their model cards: `python -m minis_recipe.card [--only mini-sd3]`.

Writes README.md next to the weights, and loss curves and sample grids to docs/minis/. Prints all figures.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import matplotlib as mpl
import torch
from PIL import Image
from solrl_minis.catalog import WEIGHTS
from solrl_minis.judge import Judge
from solrl_minis.verifier import verifier_reward
from solrl_proto.text_files import read_json

from minis_recipe import LOGS, autoencoder, clip, detection, looked_at, measure, preference, reading
from minis_recipe.card_texts import ABOUT, BACKBONE, CLIP, JUDGE, PREFERENCE, TEXT
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


def log_of(name: str, stage: str) -> list[dict[str, Any]]:
    """Logged training runs of a stage, in order; a resumed stage has several."""
    runs: list[dict[str, Any]] = read_json(LOGS / name / f"{stage}.json")["runs"]
    return runs


def draw_curves(name: str, out: Path) -> None:
    """Draw the loss curves, one panel per stage; several runs of a stage follow one another."""
    mpl.use("svg")
    from matplotlib import pyplot

    losses = {stage: [x for run in log_of(name, stage) for x in run["losses"]] for stage in MINIATURES[name].stages}
    shown = {stage: values for stage, values in losses.items() if values}
    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.4 * len(shown), 2.8), layout="constrained", squeeze=False)
    for axis, (stage, values) in zip(axes[0], shown.items(), strict=True):
        axis.semilogy(values, linewidth=1.2)
        axis.set_title(f"{stage}: {_CURVES[stage]}", fontsize=9)
        axis.set_xlabel("progress, 1/200 of a run", fontsize=8)
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


def millions(folder: Path) -> float:
    """Millions of parameters in a folder's weight files, at two bytes each."""
    files = [*folder.rglob("*.safetensors"), *folder.rglob("*.pt")]
    return sum(file.stat().st_size for file in files) / 2e6


def backbone_card(name: str, pictures: Path, device: str) -> tuple[str, dict[str, Any]]:
    """Card and figures of a pipeline."""
    folder = WEIGHTS / name
    miniature = MINIATURES[name]
    assert isinstance(miniature, MiniBackbone)
    family = miniature.family
    figures, images = family.accuracy(measure.load(folder, device))
    figures["psnr_db"] = autoencoder.psnr(load_autoencoder(folder, device), device, source=family.source)
    clips = images.ndim == 5
    if clips:  # the first, the middle and the last frame, side by side
        images = torch.cat([images[:, at] for at in (0, images.shape[1] // 2, -1)], -1)
    draw_curves(name, pictures)
    draw_grid(images, pictures / f"{name}-samples.png", columns=4 if clips else 12)
    runs = [run for stage in ("backbone", "aware") if stage in MINIATURES[name].stages for run in log_of(name, stage)]
    rows = [f"| — {kind.replace('_', ' ')} | {value:.1%} |" for kind, value in figures["kinds"].items()]
    if not clips:
        figures["fidelity"] = fidelity = measure.fidelity(measure.load(folder, device), count=8)
        sample = f"{fidelity['prompts']} prompts × {fidelity['candidates']} candidates, {fidelity['reward']}"
        rows += [
            f"| Spearman of BF16 at 6 steps with BF16 at 10 steps ({sample}) | {fidelity['spearman_bf16']:.3f} |",
            f"| Spearman of NVFP4 at 6 steps with BF16 at 10 steps | {fidelity['spearman_nvfp4']:.3f} |",
        ]
    text = BACKBONE.format(
        name=name,
        about=ABOUT[name],
        parameters=millions(folder),
        steps=measure.STEPS,
        rows="\n".join(rows),
        wrong="; ".join(
            f"{run['wrong_captions']:.0%} of them for {run['steps']:,} steps" for run in runs if "steps" in run
        ),
        **{key: figures[key] for key in ("images", "strict", "graded", "psnr_db")},
    )
    return text, figures


def text_card(name: str, pictures: Path, device: str) -> tuple[str, dict[str, Any]]:
    """Card and figures of mini-text."""
    folder = WEIGHTS / name
    backbone, vae = measure.load(folder, device), load_autoencoder(folder, device)
    words = [word for word in sample_words(True, reading.PROMPTS, seed=0) for _ in range(measure.SEEDS)]
    drawn = WordSource(1, held_out=True).images(words, device)
    with torch.no_grad():
        restored = autoencoder.from_latents(vae, autoencoder.to_latents(vae, drawn)).clamp(0, 1)
    generated = reading.accuracy(backbone)[1]
    read = {
        "drawn, not generated": reading.right(drawn, words),
        "drawn, encoded and decoded": reading.right(restored, words),
        "generated with guidance 3": reading.right(reading.accuracy(backbone, guidance=3.0)[1], words),
        "generated": reading.right(generated, words),
    }
    for length in LENGTHS:
        rows = [len(word.text) == length for word in words]
        read[f"— {length} characters"] = {engine: hits[rows] for engine, hits in read["generated"].items()}
    groups = reading.groups(folder, device, prompts=32, guidance=1.0)
    draw_curves(name, pictures)
    draw_grid(generated, pictures / f"{name}-samples.png", columns=8, rows=8)
    text = TEXT.format(
        name=name,
        about=ABOUT[name],
        parameters=millions(folder),
        trained=sum(run["steps"] for run in log_of(name, "backbone")),
        minutes=sum(run["seconds"] for run in log_of(name, "backbone")) / 60,
        steps=measure.STEPS,
        prompts=32,
        kept=reading.KEPT,
        rows="\n".join(
            f"| {label} | {len(hits['rapidocr'])} | {hits['rapidocr'].mean():.1%} | {hits['tesseract'].mean():.1%} |"
            for label, hits in read.items()
        ),
        best="\n".join(
            f"| {label} | {groups[key]:.3f} | {groups[f'{key}_best_of_24']:.3f} | {groups[f'{key}_best_of_96']:.3f} |"
            for label, key in (("share of words read right", "exact"), ("reward `ocr`", "reward"))
        ),
    )
    shares = {label: {engine: float(hit.mean()) for engine, hit in hits.items()} for label, hits in read.items()}
    return text, {"read": shares, "groups": groups}


def clip_card(name: str, pictures: Path, device: str) -> tuple[str, dict[str, Any]]:
    """Card and figures of mini-clip."""
    from transformers import AutoTokenizer, CLIPModel

    model = CLIPModel.from_pretrained(WEIGHTS / name, dtype=torch.float32).eval()
    right = clip.agreement(model, AutoTokenizer.from_pretrained(WEIGHTS / name), "cpu")
    figures = held_out_agreement(Setup(WEIGHTS, device), "clipscore")
    draw_curves(name, pictures)
    return clip_text(name, right, figures), {"agreement": right, **figures}


def clip_text(name: str, right: float, figures: dict[str, float]) -> str:
    """Card of mini-clip, from its accuracy on altered images and its agreement with the verifier by kind of pairs."""
    return CLIP.format(
        name=name,
        parameters=millions(WEIGHTS / name),
        agreement=right,
        rows=agreement_rows(figures),
    )


def agreement_rows(figures: dict[str, float]) -> str:
    """Rows of the card's table, one per kind of pairs."""
    return "\n".join(f"| held-out pairs, {where} | {value:.1%} |" for where, value in figures.items())


def preference_card(name: str, pictures: Path, device: str, reward: MiniReward) -> tuple[str, dict[str, Any]]:
    """Card and figures of a preference reward."""
    figures = reward.agreement(Setup(WEIGHTS, device))
    draw_curves(name, pictures)
    text = PREFERENCE.format(
        name=name,
        about=ABOUT[name],
        reward=reward.kind.reward,
        parameters=millions(WEIGHTS / name),
        rows=agreement_rows(figures),
        seconds=sum(run["seconds"] for run in log_of(name, "preference")),
    )
    return text, figures


def judge_card(name: str, pictures: Path, device: str) -> tuple[str, dict[str, Any]]:
    """Card and figures of the judge, each beside the verifier's."""
    judge = Judge(str(WEIGHTS / name), device=device)
    scenes = [detection.accepted(reward) for reward in (judge, verifier_reward)]
    metadata = [item for item in measure.held_out(_JUDGED) for _ in range(measure.SEEDS)]
    generated = {}
    for folder in preference.backbones(WEIGHTS):
        images = measure.accuracy(measure.load(folder, device), _JUDGED)[1]
        ours, theirs = (reward(images, [""] * len(images), metadata) == 1 for reward in (judge, verifier_reward))
        parts = (ours & theirs, ours & ~theirs, theirs & ~ours, ~ours & ~theirs)
        generated[folder.name] = [float(part.float().mean()) for part in parts]
    sheet, rows = looked_at.read(pictures)
    eyes = [looked_at.accepted(reward, sheet, rows) for reward in (judge, verifier_reward)]
    draw_curves(name, pictures)
    text = JUDGE.format(
        name=name,
        parameters=millions(WEIGHTS / name),
        seconds=sum(run["seconds"] for run in log_of(name, "detection")),
        trained=sum(run["steps"] for run in log_of(name, "detection")),
        images=len(metadata),
        scenes="\n".join(f"| {kind} | {share:.1%} | {scenes[1][kind]:.1%} |" for kind, share in scenes[0].items()),
        generated="\n".join(
            f"| {model} | {shares[0] + shares[3]:.1%} | {' | '.join(f'{share:.1%}' for share in shares)} |"
            for model, shares in generated.items()
        ),
        looked_at=len(rows),
        eyes="\n".join(
            f"| {kind} | {sum(row['right'] == (kind == 'right') for row in rows)} | {eyes[0][kind]} | {eyes[1][kind]} |"
            for kind in ("right", "wrong")
        ),
        sheet=looked_at.SHEET,
    )
    return text, {"scenes": scenes, "generated": generated, "eyes": eyes}


def main() -> None:
    """Measure the selected miniatures, draw their figures and write their cards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MINIATURES, default=list(MINIATURES))
    parser.add_argument("--pictures", type=Path, default=Path("docs/minis"))
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.pictures.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        miniature = MINIATURES[name]
        if isinstance(miniature, MiniBackbone) and miniature.family.source is WordSource:
            text, figures = text_card(name, args.pictures, args.device)
        elif isinstance(miniature, MiniBackbone):
            text, figures = backbone_card(name, args.pictures, args.device)
        elif isinstance(miniature, MiniReward):
            text, figures = preference_card(name, args.pictures, args.device, miniature)
        elif isinstance(miniature, MiniJudge):
            text, figures = judge_card(name, args.pictures, args.device)
        else:
            text, figures = clip_card(name, args.pictures, args.device)
        (WEIGHTS / name / "README.md").write_text(text, encoding="utf-8")
        print(name, json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
