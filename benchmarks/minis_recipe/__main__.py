"""Trains the miniatures.

`PYTHONPATH=benchmarks python -m minis_recipe --out FOLDER [--only mini-sd3] [--stage backbone]`

The miniatures train stage by stage, in the order of the table in `miniatures.py`. mini-clip needs an autoencoder, and
the rewards train on images that the pipelines in FOLDER generate. Figures go to
FOLDER/training/<miniature>/<stage>.json.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from minis_recipe.miniatures import MINIATURES
from minis_recipe.stages import Setup


def thin(losses: list[float], points: int = 200) -> list[float]:
    """Downsample losses to about `points` means, for the loss curve of the card."""
    size = max(1, len(losses) // points)
    parts = [losses[i : i + size] for i in range(0, len(losses), size)]
    return [round(sum(part) / len(part), 5) for part in parts]


def main() -> None:
    """Run the selected stages."""
    stages = sorted({stage for miniature in MINIATURES.values() for stage in miniature.stages})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=MINIATURES, default=list(MINIATURES))
    parser.add_argument("--stage", nargs="+", choices=stages, default=stages)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on steps and pool sizes; below 1 for a trial")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    setup = Setup(args.out, args.device, args.scale)
    for name, miniature in MINIATURES.items():
        for stage, run in miniature.stages.items():
            if name not in args.only or stage not in args.stage:
                continue
            start = time.monotonic()
            figures = run(setup, name)
            figures["seconds"] = round(time.monotonic() - start, 1)
            losses = figures.pop("losses")
            print(name, stage, figures, flush=True)
            folder = args.out / "training" / name
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"{stage}.json"
            runs = [{**figures, "losses": thin(losses)}]
            log.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
