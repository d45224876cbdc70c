"""Survival of an adapter in quantised weights: `python benchmarks/delta_survival.py`.

Merging an adapter of change D replaces a quantised weight Q(W) by Q(W + D). Measures how much of D that is, for random
weights and for the miniatures with adapters trained here; and the rank fidelity of NVFP4 exploration with the adapter
merged, with its product in BF16 beside the quantised base, and without it.
Writes docs/results/delta_survival.{json,md}.
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, get_args

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from delta_survival_report import write
from rich.console import Console
from rich.progress import track
from solrl_core.adapter import Adapter, decode_adapter
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.generator import Generator
from solrl_core.kernels import quantize_rows
from solrl_core.precision import QuantLinear, quantize_dequantize
from solrl_core.rewards import RewardSet
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import AdapterUse
from solrl_trainer.loop import train
from solrl_trainer.presets import resolve
from solrl_trainer.progress import RichReporter
from solrl_trainer.prompts import find_prompts, read_prompts
from torch import Tensor

MODELS = ("mini-sd3", "mini-sana", "mini-flux")
SIZES = (0.005, 0.02, 0.1, 0.5)
"""Sizes of D, relative to W in root mean square."""
REWARD = "clipscore"
TRUE_STEPS, STEPS = 10, 6
USES: tuple[AdapterUse, ...] = get_args(AdapterUse)
SETTINGS = (
    *("explore.source=local", "explore.precision=bf16", "explore.prompts=2", "explore.candidates=24"),
    *("explore.keep=8", "optimizer.learning_rate=2e-3", "keep_checkpoints=99", "evaluate.rewards=[]"),
    *("evaluate.prompts=1", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.fidelity_prompts=0"),
)

Layers = Sequence[tuple[Tensor, Tensor]]
"""Weight and change of each layer, [out, in]."""


def main() -> None:
    """Train the missing adapters, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--candidates", type=int, default=48)
    parser.add_argument("--runs", type=Path, default=Path("runs/delta_survival"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    settings = {key: value for key, value in vars(args).items() if key not in ("runs", "out")}
    survived, ranked, costs = list(random_weights()), [], []
    for model in args.models:
        generator = Generator(load_backbone(model), "nvfp4")
        adapter = decode_adapter(trained(model, args.runs / model, args.iterations), generator.layout)
        survived += of_model(model, generator, adapter)
        ranked += ranks(model, generator, adapter, args)
        costs.append(cost(model, generator, adapter))
        write({**settings, "survival": survived, "ranks": ranked, "cost": costs}, args.out)


def trained(model: str, folder: Path, iterations: int) -> bytes:
    """The adapter file of a run's last version; the run is trained if the folder has none."""
    file = folder / f"checkpoints/{iterations:06d}/adapter.safetensors"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        arguments = {"output": folder, "run": model, "iterations": iterations}
        config = resolve(f"{model}/sol_rl/{REWARD}", overrides=SETTINGS, arguments=arguments).config
        with RichReporter(iterations) as reporter:
            train(config, reporter, resume=True)
    return file.read_bytes()


def nvfp4(weight: Tensor) -> Tensor:
    """Round a weight [out, in] as NVFP4 layers do."""
    return quantize_dequantize(weight)


def fp8(weight: Tensor) -> Tensor:
    """Round a weight [out, in] as FP8 layers with a scale per row do."""
    codes, scales = quantize_rows(weight, "")
    return codes.float() * scales


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {"nvfp4": nvfp4, "fp8": fp8}


def survival(layers: Layers, rounding: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Figures of D' = Q(W + D) − Q(W) over all layers.

    Returns:
        `size`, |D| / |W|; `off_grid`, |Q(W) − W| / |W|; `share`, ⟨D', D⟩ / ⟨D, D⟩; `error`, |D' − D| / |D|.
    """
    sums: dict[str, float] = defaultdict(float)
    for weight, change in layers:
        base = rounding(weight)
        kept = rounding(weight + change) - base
        found = {
            "weight": weight.square(),
            "change": change.square(),
            "off": (base - weight).square(),
            "product": kept * change,
            "error": (kept - change).square(),
        }
        for name, values in found.items():
            sums[name] += float(values.sum(dtype=torch.float64))
    return {
        "size": (sums["change"] / sums["weight"]) ** 0.5,
        "off_grid": (sums["off"] / sums["weight"]) ** 0.5,
        "share": sums["product"] / sums["change"],
        "error": (sums["error"] / sums["change"]) ** 0.5,
    }


def scaled(layers: Layers, size: float) -> Layers:
    """The layers with changes of this size, relative to the weights."""
    factor = size / survival(layers, torch.clone)["size"]
    return [(weight, factor * change) for weight, change in layers]


def random_weights() -> Iterator[dict[str, Any]]:
    """Survival of random changes of rank 32 in random weights, on the grid and off it."""
    draw = torch.Generator().manual_seed(0)
    off = torch.randn(1024, 1024, generator=draw)
    change = torch.randn(1024, 32, generator=draw) @ torch.randn(32, 1024, generator=draw)
    for name, rounding in ROUNDINGS.items():
        for weights, weight in (("random", off), ("random, on the grid", rounding(off))):
            for size in SIZES:
                found = survival(scaled([(weight, change)], size), rounding)
                yield {"weights": weights, "precision": name, "adapter": "random", **found}


def of_model(model: str, generator: Generator, adapter: Adapter) -> Iterator[dict[str, Any]]:
    """Survival of a trained adapter in a miniature's quantised layers, at its own size and at others."""
    clean = generator.backbone.transformer
    layers = [(clean.get_submodule(name).weight.detach().float(), adapter.delta(name)) for name in quantised(generator)]
    for name, rounding in ROUNDINGS.items():
        for kind, own in (("trained", layers), *(("scaled", scaled(layers, size)) for size in SIZES)):
            yield {"weights": model, "precision": name, "adapter": kind, **survival(own, rounding)}


def quantised(generator: Generator) -> list[str]:
    """Names of the adapted layers that are quantised."""
    return [name for name in generator.layout if isinstance(generator.transformer.get_submodule(name), QuantLinear)]


def ranks(model: str, cheap: Generator, adapter: Adapter, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rank fidelity of exploration with the adapter merged, unmerged and left out; a row for each."""
    exact, rewards = Generator(cheap.backbone, "bf16"), RewardSet.load([REWARD], cheap.backbone)
    prompts = read_prompts(find_prompts("shapes"), "test")[: args.prompts]

    def scores(generator: Generator, steps: int, own: Adapter | None, use: AdapterUse = "merged") -> Tensor:
        generator.set_adapter(own, use)
        rows = []
        for prompt in track(prompts, f"{model}, groups", console=Console(stderr=True)):
            seeds = expand_seeds(0, prompt.id, args.candidates)
            images = generator.generate(prompt.text, seeds, steps=steps).images
            texts, metadata = [prompt.text] * len(seeds), [prompt.metadata] * len(seeds)
            rows.append(rewards.score([REWARD], images, texts, metadata)[REWARD])
        return torch.stack(rows)

    true = scores(exact, TRUE_STEPS, adapter)
    proxies = {
        "merged": scores(cheap, STEPS, adapter),
        "unmerged": scores(cheap, STEPS, adapter, "unmerged"),
        "without it": scores(cheap, STEPS, None),
    }
    found = []
    for way, proxy in proxies.items():
        each = [rank_fidelity(p[None], t[None]) for p, t in zip(proxy, true, strict=True)]
        ends = {end: mean(getattr(one, end) for one in each) for end in ("top_rank", "bottom_rank")}
        found.append({"model": model, "adapter": way, **ends, "spearman": [one.spearman for one in each]})
    return found


def cost(model: str, generator: Generator, adapter: Adapter) -> dict[str, Any]:
    """Median seconds of a chunk of 24 and of a change of the adapter, merged and unmerged, in turns."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(5):
        for use in USES:
            began = time.perf_counter()
            generator.set_adapter(adapter, use)
            changed = time.perf_counter()
            generator.generate("a red circle", range(24), steps=STEPS, decode=False)
            seconds[use].append(time.perf_counter() - changed)
            seconds[f"{use}, change"].append(changed - began)
    return {"model": model, **{name: median(values) for name, values in seconds.items()}}


if __name__ == "__main__":
    main()
