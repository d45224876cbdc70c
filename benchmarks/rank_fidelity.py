"""Rank fidelity of cheap exploration: `python benchmarks/rank_fidelity.py [--models mini-sana …]`.

Compares the rewards of NVFP4 at 6 steps, and of BF16 at 6 steps (the upper bound for any quantisation), with those of
BF16 at 10 steps, on held-out prompts with 96 candidates each from the same seeds.
Writes docs/results/rank_fidelity.{json,md}.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from caveats import PREPARED_FOR_NVFP4
from rank_tables import HEADER, Row, cells, command, options, run
from rich.console import Console
from rich.progress import track
from solrl_core.families import load_backbone
from solrl_core.fidelity import Fidelity, rank_fidelity
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_core.solver_specs import SOLVERS
from solrl_proto.noise import expand_seeds
from solrl_trainer.prompts import find_prompts, read_prompts

NAME = "rank_fidelity"
TRUE = ("bf16", 10)
PROXIES = (("bf16", 6), ("nvfp4", 6))
PAPER = {
    "clipscore": (0.752, 0.900),
    "pickscore": (0.806, 0.934),
    "hpsv2": (0.827, 0.943),
    "imagereward": (0.807, 0.932),
}
"""Kendall and Spearman of NVFP4 at 6 steps against BF16 at 10, on the paper's large models (arXiv 2604.06916)."""


def _options() -> argparse.ArgumentParser:
    parser = options(__doc__, prompts=64)
    parser.add_argument("--prompt-set", default="shapes")
    parser.add_argument("--solver", choices=sorted(SOLVERS), default="euler", help="the paper's for SD3 and FLUX: dpm2")
    return parser


def measure(model: str, args: argparse.Namespace) -> list[Row]:
    """Measure one model; a row per reward and proxy."""
    backbone = load_backbone(model, device=args.device)
    rewards = RewardSet.load(args.rewards, backbone)
    generators = {precision: Generator(backbone, precision) for precision in ("bf16", "nvfp4")}
    plans = (TRUE, *PROXIES)
    scores: dict[tuple[tuple[str, int], str], list[torch.Tensor]] = {(p, r): [] for p in plans for r in args.rewards}
    prompts = read_prompts(find_prompts(args.prompt_set), "test")[: args.prompts]
    for prompt in track(prompts, f"{model}, groups", console=Console(stderr=True)):
        seeds = expand_seeds(0, prompt.id, args.candidates)
        for plan in plans:
            made = generators[plan[0]].generate(prompt.text, seeds, steps=plan[1], solver=args.solver)
            texts, metadata = [prompt.text] * len(seeds), [prompt.metadata] * len(seeds)
            for reward, values in rewards.score(args.rewards, made.images, texts, metadata).items():
                scores[plan, reward].append(values)
    share = backbone.quantized_share("nvfp4")
    return [
        {
            "model": model,
            "reward": reward,
            "proxy": f"{plan[0].upper()} {plan[1]} steps",
            "quantized_share": share if plan[0] == "nvfp4" else 0.0,
            **vars(rank_fidelity(torch.stack(scores[plan, reward]), torch.stack(scores[TRUE, reward]))),
        }
        for reward in args.rewards
        for plan in PROXIES
    ]


def table(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    """Markdown table of all rows, with the command and device of the measurement."""
    solver, device = settings.get("solver", "euler"), settings["device"]
    lines = [
        "# Rank fidelity of exploration",
        "",
        f"By `{command(NAME, _options(), settings)}`, on the device `{device}` with the solver `{solver}`:",
        f"{settings['prompts']} held-out prompts × {settings['candidates']} candidates, compared with the same seeds",
        f"in {TRUE[0].upper()} at {TRUE[1]} steps. Overlaps are shares of the best (worst) 4/8/12.",
        "True ranks are means over the 12 candidates ranked best (worst) by the proxy: perfect 6.5 / 90.5, chance",
        "48.5. The last column gives Kendall and Spearman of the paper, on its large models.",
        "",
        *PREPARED_FOR_NVFP4,
        "",
        f"| model | reward | proxy | {HEADER} | paper |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = Fidelity(**{name: row[name] for name in Fidelity.__dataclass_fields__})
        quantised = row["quantized_share"] > 0
        paper = ", ".join(f"{v:.3f}" for v in PAPER.get(row["reward"], ())) if quantised else ""
        names = f"{row['model']} | {row['reward']} | {row['proxy']}"
        lines.append(f"| {names} | {cells(found)} | {paper} |")
    shares = {row["model"]: row["quantized_share"] for row in rows if row["quantized_share"]}
    said = ", ".join(f"{model} {share:.1%}" for model, share in shares.items())
    return "\n".join([*lines, "", f"Share of the blocks' linear FLOPs in NVFP4: {said}."]) + "\n"


if __name__ == "__main__":
    run(NAME, _options(), measure, table)
