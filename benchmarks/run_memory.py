"""Planned and measured memory of runs at the real models' shapes: `python benchmarks/run_memory.py`, on a CUDA GPU.

Plans the presets of `sol_rl` with local exploration from configurations alone, as `solrl-train memory` does. Then
trains one iteration with random weights and a reward of HPSv2's size, and compares the peak of allocated memory. Each
model runs in a separate process; models that did not run keep their rows. Writes run_memory.{json,md}.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from solrl_core.precision.support import fastest_precision
from solrl_core.rewards import RewardSet
from solrl_trainer import loop
from solrl_trainer.memory.run_memory import plan_run
from solrl_trainer.records.progress import RichReporter
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve
from support.random_weights import materialize
from support.results import Row, device_name, measure_models, table
from support.true_size import random_hps, skeleton

PRESETS = {
    **{"flux": "flux1", "sd3": "sd3", "sana": "sana", "sd3-medium": "sd3-medium", "z-image": "z-image"},
    **{"qwen-image": "qwen-image", "flux2-klein": "flux2-klein", "wan": "wan", "wan-14b": "wan-14b"},
}
SETTINGS = (
    *("prompts=shapes", "iterations=1", "explore.prompts=1", "algorithm.timestep_fraction=0.1"),
    *("evaluate.prompts=24", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.fidelity_prompts=0"),
)
"""Changes to a preset: one prompt, one noise level per sample, and few steps of evaluation."""


HEAD = ("model", "micro-batch", "recomputed blocks", "planned, GiB", "measured, GiB", "difference", "reserved, GiB")


def main() -> None:
    further = "further settings of all runs, key=value"
    measure_models(
        "run_memory",
        __doc__,
        list(PRESETS),
        measure,
        page,
        "model",
        further=lambda parser: parser.add_argument("--set", nargs="*", default=[], help=further),
    )


def measure(family: str, args: argparse.Namespace) -> Iterator[Row]:
    """Plan a run and train one iteration; yields one row (GiB)."""
    device = args.device
    with tempfile.TemporaryDirectory() as folder:
        config = resolve(
            f"{PRESETS[family]}/sol_rl/hpsv2",
            overrides=[*SETTINGS, f"device={device}", *args.set],
            arguments={"output": Path(folder, "run"), "run": "memory"},
        ).config
        gpu = torch.cuda.get_device_properties(device).total_memory if device != "cpu" else 80 * 10**9
        plan = plan_run(config, skeleton(family, Path(folder), device), fastest_precision(torch.device(device)))
        layout = plan.layout(gpu)
        train(config, family, Path(folder), device)
    measured, reserved = peaks(device)
    # One prompt is encoded here; a full cache of them is planned.
    planned = plan.total(layout) - plan.iteration["cached prompts"]
    yield {
        "model": family,
        "device": device_name(device),
        "micro_batch": config.optimizer.batch,
        "recomputed": layout.checkpointed,
        "planned": planned / 2**30,
        "measured": measured / 2**30,
        "reserved": reserved / 2**30,
    }


def train(config: RunConfig, family: str, folder: Path, device: str) -> None:
    backbone = materialize(skeleton(family, folder, device), device)
    rewards = RewardSet({"hpsv2": random_hps(device)})
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    with (
        patch("solrl_trainer.rollouts.loading.load_backbone", return_value=backbone),
        patch("solrl_trainer.rollouts.loading.RewardSet.load", return_value=rewards),
        RichReporter(config.iterations) as reporter,
    ):
        loop.train(config, reporter)


def peaks(device: str) -> tuple[float, float]:
    """Peaks of allocated and of reserved bytes; NaN on a CPU."""
    if device == "cpu":
        return math.nan, math.nan
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def sizes(row: Row) -> Sequence[str]:
    planned, measured, reserved = row["planned"], row["measured"], row["reserved"]
    return f"{planned:.2f}", f"{measured:.2f}", f"{planned / measured - 1:+.1%}", f"{reserved:.2f}"


def page(found: Mapping[str, Any]) -> str:
    rows = found["rows"]
    lines = [
        "# Planned and measured memory of a run",
        "",
        f"By `python benchmarks/run_memory.py` on one {rows[0]['device']}: the presets of `sol_rl` with local",
        "exploration, random weights at true size, one iteration. Planned is computed from configurations alone;",
        "measured is the peak of allocated tensors; reserved is the peak of the memory that CUDA's allocator held.",
        "",
        *table(HEAD, ((r["model"], r["micro_batch"], r["recomputed"], *sizes(r)) for r in rows)),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
