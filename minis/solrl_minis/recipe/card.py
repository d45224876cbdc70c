"""Measure the shipped miniatures and write their model cards: `python -m solrl_minis.recipe.card`.

Writes README.md beside the weights, and the loss curves and a sample grid into docs/minis/.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import matplotlib as mpl
import torch
from diffusers import AutoencoderDC
from PIL import Image
from solrl_core.families import load_backbone
from solrl_core.generator import Generator
from solrl_proto.noise import expand_seeds
from transformers import AutoTokenizer, CLIPModel

from solrl_minis.catalog import WEIGHTS, prompts
from solrl_minis.recipe import autoencoder, clip
from solrl_minis.verifier import verify_batch
from solrl_minis.world import KINDS

SEEDS = 4
STEPS = 10
_CURVES = {
    "autoencoder": "reconstruction",
    "backbone": "flow matching",
    "aware": "NVFP4 distance, relative",
    "clip": "contrastive",
}


def measure_backbone(count: int | None = None) -> tuple[dict[str, Any], torch.Tensor]:
    """Strict accuracy on the shipped held-out prompts, 4 seeds each, 10 steps in BF16; and the images."""
    lines = (prompts() / "test_metadata.jsonl").read_text().splitlines()[:count]
    items = [json.loads(line) for line in lines]
    generator = Generator(load_backbone("mini-sana"), "bf16")
    pairs = [(item, seed) for item in items for seed in expand_seeds(1, item["prompt"], SEEDS)]
    made = generator.generate([item["prompt"] for item, _ in pairs], [seed for _, seed in pairs], steps=STEPS)
    verdicts = verify_batch(made.images, [item for item, _ in pairs])
    by_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for (item, _), verdict in zip(pairs, verdicts, strict=True):
        by_kind[item["tag"]].append(verdict.strict)
    strict = sum(verdict.strict for verdict in verdicts) / len(verdicts)
    figures = {
        "strict": strict,
        "graded": sum(verdict.graded for verdict in verdicts) / len(verdicts),
        "kinds": {kind: sum(v) / len(v) for kind, v in by_kind.items() if v},
        "images": len(verdicts),
    }
    return figures, made.images


def draw_curves(training: Path, out: Path) -> None:
    """One panel a training stage."""
    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_CURVES), figsize=(3.4 * len(_CURVES), 2.8), layout="constrained")
    for axis, (name, label) in zip(axes, _CURVES.items(), strict=True):
        log = json.loads((training / f"{name}.json").read_text())
        losses = [loss for go in log.get("goes", [log]) for loss in go["losses"]]
        axis.semilogy(losses, linewidth=1.2)
        axis.set_title(f"{name}: {label}", fontsize=9)
        axis.set_xlabel("two-hundredths of a go", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(out / "losses.png", dpi=130)


def draw_grid(images: torch.Tensor, out: Path, columns: int = 12, rows: int = 6) -> None:
    """The first images, one a prompt, enlarged twice."""
    chosen = images[::SEEDS][: columns * rows]
    side = images.shape[-1]
    grid = torch.nn.functional.pad(chosen, (2, 2, 2, 2), value=1.0)
    cell = side + 4
    grid = grid.view(-1, columns, 3, cell, cell).permute(2, 0, 3, 1, 4).reshape(3, -1, columns * cell)
    pixels = (grid * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels)
    picture.resize((picture.width * 3 // 2, picture.height * 3 // 2), Image.Resampling.BICUBIC).save(
        out / "samples.png"
    )


_BACKBONE_CARD = """# mini-sana

A miniature of SANA for the shapes world: the real classes (`SanaPipeline`: AutoencoderDC, SanaTransformer2DModel,
Gemma-2 text encoder, Gemma tokenizer), {parameters:.2f} M parameters in BF16, 64 px, 8×8×8 latents, 16 image tokens.
Trained from nothing on rendered scenes by `python -m solrl_minis.recipe`; no photograph, no other model's output.

| measured by `python -m solrl_minis.recipe.card` | |
|---|---|
| strict accuracy, held-out prompts, {steps} steps, BF16 ({images} images) | {strict:.1%} |
| graded | {graded:.3f} |
{kinds}
| autoencoder, held-out scenes | {psnr:.1f} dB |

The accuracy is low on purpose, to leave room for reinforcement learning: {wrong:.0%} of the captions it was
trained on had one attribute wrong, and later {aware_wrong:.0%}. Held-out combinations (15 % of each kind) were
never shown, neither as image nor as text.

A third stage taught the transformer to keep its course in NVFP4 (`recipe/quantization.py`): a model this small loses
more to four bits than the large ones it stands for. The shipped weights went through that stage in
{goes}; the recipe now does it
in one go of 4,000 steps. `benchmarks/rank_fidelity.py` measures what remains.

![loss curves](../../../../docs/minis/losses.png)

![one sample for each of the first held-out prompts](../../../../docs/minis/samples.png)

Licence: Apache-2.0, as the project.
"""

_CLIP_CARD = """# mini-clip

A miniature CLIP (transformers' `CLIPModel`, {parameters:.2f} M parameters in BF16, 64 px, patches of 8, 24 text
tokens) for the shapes world: the reward `clipscore` of the miniatures. Trained by `python -m solrl_minis.recipe` on
rendered scenes, half of them through the autoencoder with noisy latents, against captions that differ in one
attribute. It never saw held-out combinations, the verifier's judgement, or a generated image.

| measured by `python -m solrl_minis.recipe.card` | |
|---|---|
| held-out prompts: right image beats one that differs in one attribute | {agreement:.1%} |

Licence: Apache-2.0, as the project.
"""


def main() -> None:
    """Measure, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, default=Path("docs/minis"))
    args = parser.parse_args()
    args.pictures.mkdir(parents=True, exist_ok=True)
    training = WEIGHTS / "training"
    figures, images = measure_backbone()
    draw_curves(training, args.pictures)
    draw_grid(images, args.pictures)
    backbone = load_backbone("mini-sana")
    vae = AutoencoderDC.from_pretrained(WEIGHTS / "mini-sana" / "vae", torch_dtype=torch.float32)
    aware = json.loads((training / "aware.json").read_text())
    goes = aware.get("goes", [aware])
    parts = (backbone.parts[name] for name in ("transformer", "text_encoder", "vae"))
    card = _BACKBONE_CARD.format(
        parameters=sum(p.numel() for part in parts for p in part.parameters()) / 1e6,
        steps=STEPS,
        images=figures["images"],
        strict=figures["strict"],
        graded=figures["graded"],
        kinds="\n".join(f"| — {kind.replace('_', ' ')} | {value:.1%} |" for kind, value in figures["kinds"].items()),
        psnr=autoencoder.psnr(vae, "cpu"),
        wrong=json.loads((training / "backbone.json").read_text())["wrong_captions"],
        aware_wrong=goes[-1]["wrong_captions"],
        goes=" and ".join(f"{go['steps']:,} steps ({go['wrong_captions']:.0%} wrong captions)" for go in goes),
    )
    (WEIGHTS / "mini-sana" / "README.md").write_text(card)
    model = CLIPModel.from_pretrained(WEIGHTS / "mini-clip", torch_dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "mini-clip")
    card = _CLIP_CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        agreement=clip.agreement(model, tokenizer, "cpu"),
    )
    (WEIGHTS / "mini-clip" / "README.md").write_text(card)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
