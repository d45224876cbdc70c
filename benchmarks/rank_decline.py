"""Why ranks fall while a policy trains: `python benchmarks/rank_decline.py`.

Trains a miniature, and measures the rank fidelity of cheap exploration under versions of its policy, with the two
quantities that it depends on: the spread of true scores in a group, and the noise of proxy scores about them.
Exploration takes six steps in BF16, and in NVFP4 with the adapter merged and unmerged.
Writes docs/results/rank_decline.{json,md}.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from delta_survival import REWARD, STEPS, TRUE_STEPS
from rich.console import Console
from rich.progress import track
from solrl_core.adapter import Adapter, decode_adapter
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import AdapterUse, PromptItem
from solrl_trainer.evaluation import mean_interval
from solrl_trainer.loop import train
from solrl_trainer.presets import resolve
from solrl_trainer.progress import RichReporter
from solrl_trainer.prompts import find_prompts, read_prompts
from torch import Tensor

EVERY = 10
SETTINGS = (
    *("explore.source=local", "explore.precision=nvfp4", "explore.prompts=4", "explore.candidates=48"),
    *("explore.keep=16", "optimizer.learning_rate=1e-3", f"checkpoint_every={EVERY}", "keep_checkpoints=99"),
    *("evaluate.prompts=1", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.fidelity_prompts=0"),
    "evaluate.rewards=[]",
)
WAYS: Mapping[str, tuple[str, AdapterUse]] = {
    "BF16": ("bf16", "merged"),
    "NVFP4": ("nvfp4", "merged"),
    "NVFP4, unmerged": ("nvfp4", "unmerged"),
}
HEAD = """# Why ranks fall while a policy trains

By `{command}` on CPU cores. {model} is trained on {reward} by a small run (4 prompts × 48 candidates, 16 kept, explored
in emulated NVFP4, learning rate 1e-3). At each version, {prompts} held-out prompts × {candidates} candidates are scored
in BF16 at {true_steps} steps (*true*) and at {steps} steps, in BF16 and in NVFP4 with the adapter merged, or unmerged
beside the quantised base.

Spread: standard deviation of a group's true scores. Noise: standard deviation of the proxy scores about a straight
line through them over the true scores. Both are in units of the base's mean spread. Means over prompts, with 95 %
intervals.

| iteration | explored in | Spearman | spread | noise | spread / noise |
|---|---|---|---|---|---|
"""


def main() -> None:
    """Train if the run is missing, measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mini-sana")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--candidates", type=int, default=48)
    parser.add_argument("--runs", type=Path, default=Path("runs/rank_decline"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    versions = range(0, args.iterations + 1, EVERY)
    folder = args.runs / args.model
    run(args.model, folder, args.iterations)
    backbone = load_backbone(args.model)
    generators = {precision: Generator(backbone, precision) for precision, _ in WAYS.values()}
    rewards = RewardSet.load([REWARD], backbone)
    prompts = read_prompts(find_prompts("shapes"), "test")[: args.prompts]
    score = partial(scores, prompts=prompts, candidates=args.candidates, rewards=rewards)
    rows: list[dict[str, Any]] = []
    for version in versions:
        file = folder / f"checkpoints/{version:06d}/adapter.safetensors"
        adapter = decode_adapter(file.read_bytes(), generators["bf16"].layout) if version else None
        true = score(generators["bf16"], adapter, "merged", steps=TRUE_STEPS)
        for way, (precision, use) in WAYS.items():
            proxy = score(generators[precision], adapter, use, steps=STEPS)
            rows.append({"version": version, "way": way, **measured(proxy, true)})
    settings = {name: getattr(args, name) for name in ("model", "iterations", "prompts", "candidates")}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rank_decline.json").write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")
    text = page(settings, rows)
    (args.out / "rank_decline.md").write_text(text)
    print(text)


def run(model: str, folder: Path, iterations: int) -> None:
    """Train the model, or continue where an earlier command stopped."""
    if (folder / f"checkpoints/{iterations:06d}/adapter.safetensors").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    arguments = {"output": folder, "run": model, "iterations": iterations}
    config = resolve(f"{model}/sol_rl/{REWARD}", overrides=SETTINGS, arguments=arguments).config
    with RichReporter(iterations) as reporter:
        train(config, reporter, resume=True)


def scores(
    generator: Generator,
    adapter: Adapter | None,
    use: AdapterUse,
    *,
    steps: int,
    prompts: Sequence[PromptItem],
    candidates: int,
    rewards: RewardSet,
) -> Tensor:
    """Scores [prompts, candidates]."""
    generator.set_adapter(adapter, "merged" if adapter is None else use)
    rows = []
    for prompt in track(prompts, f"{generator.precision}, {steps} steps", console=Console(stderr=True)):
        seeds = expand_seeds(0, prompt.id, candidates)
        images = generator.generate(prompt.text, seeds, steps=steps).images
        texts, metadata = [prompt.text] * len(seeds), [prompt.metadata] * len(seeds)
        rows.append(rewards.score([REWARD], images, texts, metadata)[REWARD])
    return torch.stack(rows)


def measured(proxy: Tensor, true: Tensor) -> dict[str, list[float]]:
    """Spearman correlation, spread of the true scores and noise of the proxy scores, one for each prompt.

    Args:
        proxy, true: scores [prompts, candidates].
    """
    spearman = [rank_fidelity(p[None], t[None]).spearman for p, t in zip(proxy, true, strict=True)]
    found, wanted = (x.double() - x.double().mean(1, keepdim=True) for x in (proxy, true))
    slope = (found * wanted).sum(1, keepdim=True) / wanted.square().sum(1, keepdim=True)
    noise = (found - slope * wanted).square().mean(1).sqrt()
    return {"spearman": spearman, "spread": wanted.square().mean(1).sqrt().tolist(), "noise": noise.tolist()}


def page(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of the results."""
    unit = float(np.mean(rows[0]["spread"]))
    command = "python benchmarks/rank_decline.py"
    head = HEAD.format(command=command, reward=REWARD, steps=STEPS, true_steps=TRUE_STEPS, **settings)
    lines = []
    for row in rows:
        spread, noise = (np.array(row[name]) / unit for name in ("spread", "noise"))
        cells = [_interval(np.array(row["spearman"])), _interval(spread), _interval(noise), _interval(spread / noise)]
        lines.append(f"| {row['version']} | {row['way']} | {' | '.join(cells)} |\n")
    return head + "".join(lines)


def _interval(values: Any) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
