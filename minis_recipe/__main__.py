"""Trains the miniatures: `python -m minis_recipe --out FOLDER [--only mini-sd3] [--stage backbone]`.

The miniatures train stage by stage, in the order of the table in `miniatures.py`. mini-clip needs an autoencoder, and
the rewards train on images that the pipelines in FOLDER generate. Figures go to
FOLDER/training/<miniature>/<stage>.json.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from solrl_proto.text_files import read_json

from minis_recipe.loop import Speed
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
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit of each stage")
    parser.add_argument("--resume", action="store_true", help="continue training what is in FOLDER")
    parser.add_argument("--wrong-captions", type=float, help="share of wrong captions, overriding the table's")
    parser.add_argument("--eager", action="store_true", help="train without torch.compile and CUDA graphs")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU unless --eager")
    parser.add_argument("--float32", action="store_true", help="train backbones in float32 instead of bfloat16")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    fast = args.device == "cuda" and not args.eager
    speed = Speed(fast if args.compile is None else args.compile, fast, not args.float32)
    setup = Setup(args.out, args.device, args.scale, args.seconds, speed, args.resume, args.wrong_captions)
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
            runs = read_json(log)["runs"] if args.resume and log.is_file() else []
            runs.append({**figures, "losses": thin(losses)})
            log.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
