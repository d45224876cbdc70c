"""Rank fidelity of cheap exploration: `python benchmarks/rank_fidelity.py [--models mini-sana …]`.

Compares the rewards of NVFP4 and FP8 at 6 steps, and of BF16 at 6 steps (the upper bound for any quantisation), with
those of BF16 at 10 steps, on held-out prompts with 96 candidates each from the same seeds. The solver is the one that
the preset of the model's family uses. Without FP8 units, FP8 is emulated.
Writes docs/results/rank_fidelity.{json,md}.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from caveats import PREPARED_FOR_NVFP4
from rank_tables import HEADER, MODELS, Row, cells, command, options, run
from rich.console import Console
from rich.progress import track
from solrl_core.families import load_backbone
from solrl_core.fidelity import Fidelity, rank_fidelity
from solrl_core.rewards import RewardSet
from solrl_core.solver_specs import SOLVERS
from solrl_proto.noise import expand_seeds
from solrl_trainer.prompts import find_prompts, read_prompts
from support.precisions import OF_PRESET, PRECISIONS, generator_at, named, solver_of

NAME = "rank_fidelity"
TRUE = ("bf16", 10)
STEPS = 6
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
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--solver", choices=(OF_PRESET, *sorted(SOLVERS)), default=OF_PRESET)
    return parser


def measure(model: str, args: argparse.Namespace) -> list[Row]:
    """Measure one model; a row per reward and proxy."""
    backbone = load_backbone(model, device=args.device)
    rewards = RewardSet.load(args.rewards, backbone)
    generators = {precision: generator_at(backbone, precision) for precision in ("bf16", *args.precisions)}
    solver = solver_of(args.solver, backbone.family)
    proxies = [(precision, STEPS) for precision in generators]
    plans = (TRUE, *proxies)
    scores: dict[tuple[tuple[str, int], str], list[torch.Tensor]] = {(p, r): [] for p in plans for r in args.rewards}
    prompts = read_prompts(find_prompts(args.prompt_set), "test")[: args.prompts]
    for prompt in track(prompts, f"{model}, groups", console=Console(stderr=True)):
        seeds = expand_seeds(0, prompt.id, args.candidates)
        for plan in plans:
            made = generators[plan[0]].generate(prompt.text, seeds, steps=plan[1], solver=solver)
            texts, metadata = [prompt.text] * len(seeds), [prompt.metadata] * len(seeds)
            for reward, values in rewards.score(args.rewards, made.images, texts, metadata).items():
                scores[plan, reward].append(values)
    return [
        {
            "model": model,
            "reward": reward,
            "solver": solver,
            "precision": plan[0],
            "numerics": generators[plan[0]].numerics,
            "proxy": f"{plan[0].upper()} {plan[1]} steps",
            "quantized_share": backbone.quantized_share(plan[0]),
            **vars(rank_fidelity(torch.stack(scores[plan, reward]), torch.stack(scores[TRUE, reward]))),
        }
        for reward in args.rewards
        for plan in proxies
    ]


def table(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    """Markdown table of all rows, with the command and device of the measurement."""
    quantised = [row for row in rows if row["quantized_share"] > 0]
    lines = [
        "# Rank fidelity of exploration",
        "",
        f"By `{command(NAME, _options(), settings)}`, on the device `{settings['device']}`:",
        f"{settings['prompts']} held-out prompts × {settings['candidates']} candidates at",
        f"{named([(row['precision'], row['numerics']) for row in quantised])}, compared with the same seeds",
        f"in {TRUE[0].upper()} at {TRUE[1]} steps. Overlaps are shares of the best (worst) 4/8/12.",
        "True ranks are means over the 12 candidates ranked best (worst) by the proxy: perfect 6.5 / 90.5, chance",
        "48.5. The last column gives Kendall and Spearman of the paper, on its large models.",
        "",
        *([*PREPARED_FOR_NVFP4, ""] if set(settings["models"]) & set(MODELS) else []),
        f"| model | solver | reward | proxy | {HEADER} | paper |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = Fidelity(**{name: row[name] for name in Fidelity.__dataclass_fields__})
        paper = ", ".join(f"{v:.3f}" for v in PAPER.get(row["reward"], ())) if row["precision"] == "nvfp4" else ""
        names = f"{row['model']} | {row['solver']} | {row['reward']} | {row['proxy']}"
        lines.append(f"| {names} | {cells(found)} | {paper} |")
    shares = {(row["precision"], row["model"]): row["quantized_share"] for row in quantised}
    said = ", ".join(f"{model} {precision.upper()} {share:.1%}" for (precision, model), share in shares.items())
    return "\n".join([*lines, "", f"Share of the blocks' linear FLOPs that are quantised: {said}."]) + "\n"


def main() -> None:
    """Measure, print the page and write it."""
    run(NAME, _options(), measure, table)


if __name__ == "__main__":
    main()
