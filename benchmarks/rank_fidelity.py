"""Rank fidelity of cheap exploration: `python benchmarks/rank_fidelity.py [--models mini-sana …]`.

Compares the rewards of NVFP4 and FP8 at 6 steps, and of BF16 at 6 steps (the upper bound for any quantisation), with
those of BF16 at 10 steps, on held-out prompts with 96 candidates each from the same seeds. The solver is the one that
the preset of the model's family uses. Without FP8 units, FP8 is emulated.
Models measured before with the same settings stay. Writes benchmarks/results/rank_fidelity.{json,md}.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from scipy.stats import kendalltau
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.rewards import RewardSet
from solrl_core.sampling.sampler import SOLVERS
from solrl_engine.precision_check import generator_at
from solrl_proto.noise import expand_seeds
from solrl_proto.selection import merge_ties
from solrl_trainer.prompts.prompt_sets import find_prompts, read_prompts
from support.caveats import PREPARED_FOR_NVFP4
from support.precisions import LISTS, MODELS, PRECISIONS, PRESET, QUANTISED, REWARDS, named, solver_of, use_layers
from support.results import Results, Row, command, options, table

NAME = "rank_fidelity"
TRUE = ("bf16", 10)
STEPS = 6
HEAD = (
    *("model", "solver", "reward", "proxy", "Kendall", "Spearman", "best 4/8/12", "worst 4/8/12"),
    *("true ranks", "paper"),
)
PAPER = {
    "clipscore": (0.752, 0.900),
    "pickscore": (0.806, 0.934),
    "hpsv2": (0.827, 0.943),
    "imagereward": (0.807, 0.932),
}
"""Kendall and Spearman of NVFP4 at 6 steps against BF16 at 10, on the paper's large models (arXiv 2604.06916)."""


def _options() -> argparse.ArgumentParser:
    parser = options(__doc__, device="cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rewards", nargs="+", default=list(REWARDS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--prompt-set", default="shapes")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--layers", choices=LISTS, default=LISTS[0], help="quantised at NVFP4")
    parser.add_argument("--solver", choices=(PRESET, *sorted(SOLVERS)), default=PRESET)
    return parser


def measure(model: str, args: argparse.Namespace) -> list[Row]:
    """Measure one model; a row per reward and proxy."""
    backbone = load_backbone(model, device=args.device)
    use_layers(backbone, args.layers)
    rewards = RewardSet.load(args.rewards, backbone)
    names = ("bf16", *args.precisions)
    generators = {one: generator_at(backbone, one) for one in names}
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
            "kendall": kendall(scores[plan, reward], scores[TRUE, reward]),
            **vars(rank_fidelity(torch.stack(scores[plan, reward]), torch.stack(scores[TRUE, reward]))),
        }
        for reward in args.rewards
        for plan in proxies
    ]


def kendall(proxy: Sequence[torch.Tensor], true: Sequence[torch.Tensor]) -> float:
    """Mean of Kendall's τ between the rewards [candidates] of the same prompt."""
    merged = ([merge_ties(group.double().tolist()) for group in rewards] for rewards in (proxy, true))
    return float(np.mean([kendalltau(*pair).statistic for pair in zip(*merged, strict=True)]))


def page(found: Mapping[str, Any]) -> str:
    """Markdown page, with the command and device of the measurement."""
    rows: list[Row] = found["rows"]
    quantised = [row for row in rows if row["quantized_share"] > 0]
    shares = {(row["precision"], row["model"]): row["quantized_share"] for row in quantised}
    said = ", ".join(f"{model} {precision.upper()} {share:.1%}" for (precision, model), share in shares.items())
    lines = [
        "# Rank fidelity of exploration",
        "",
        f"By `{command(NAME, _options(), found)}`, on the device `{found['device']}`:",
        f"{found['prompts']} held-out prompts × {found['candidates']} candidates at",
        f"{named([(row['precision'], row['numerics']) for row in quantised])}, compared with the same seeds",
        f"in {TRUE[0].upper()} at {TRUE[1]} steps. Overlaps are shares of the best (worst) 4/8/12.",
        "True ranks are means over the 12 candidates ranked best (worst) by the proxy: perfect 6.5 / 90.5, chance",
        "48.5. The last column gives Kendall and Spearman of the paper, on its large models.",
        "",
        QUANTISED[found["layers"]],
        "",
        *([*PREPARED_FOR_NVFP4, ""] if set(found["models"]) & set(MODELS) else []),
        *table(HEAD, map(_cells, rows)),
        "",
        f"Share of the blocks' linear FLOPs that are quantised: {said}.",
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> Sequence[str]:
    names = [row[name] for name in ("model", "solver", "reward", "proxy")]
    overlaps = ("/".join(f"{v:.2f}" for v in row[of].values()) for of in ("top_overlap", "bottom_overlap"))
    ranks = f"{row['top_rank']:.1f} / {row['bottom_rank']:.1f}"
    paper = ", ".join(f"{v:.3f}" for v in PAPER.get(row["reward"], ())) if row["precision"] == "nvfp4" else ""
    return *names, f"{row['kendall']:.3f}", f"{row['spearman']:.3f}", *overlaps, ranks, paper


def main() -> None:
    args = _options().parse_args()
    results = Results(NAME, args.out, page)
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "render", "models")}
    if not args.render and any(results.found.get(key) != value for key, value in settings.items()):
        results.found = {"models": [], **settings}
    for model in () if args.render else args.models:
        results.found["models"] = [*(one for one in results.found["models"] if one != model), model]
        for row in measure(model, args):
            results.add(row, "model", "reward", "proxy")
    results.show()


if __name__ == "__main__":
    main()
