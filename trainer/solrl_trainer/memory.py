"""`solrl-train memory`: the GPU memory of a run, planned from its settings and the model's configurations."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.memory import GPUS, RESERVED
from solrl_core.precision import fastest_tier
from solrl_proto.identifiers import Tier

from solrl_trainer.config import RunConfig
from solrl_trainer.run_memory import RunMemory, plan_run

_ASSUMED_GB = 80.0
_ASSUMED_TIER: Tier = "fp8"
"""Memory of the planned GPU if this machine has none: an H100."""
_LEAST = 2**20 // 20
"""Smaller rows are omitted: they would show 0.0 MiB."""
_NAMES = {
    "transformer": "frozen base",
    "vae": "autoencoder",
    "generator": "BF16 generator, merged",
    "explorer": "local explorer's generator, merged",
    "reference": "FP8 reference",
}
_TRAINING = {
    "kept": "train: activations of {kept} blocks",
    "inputs": "train: inputs of {recomputed} blocks that recompute",
    "working": "train: backward pass of one block",
}


def plan(config: RunConfig, *, gpu: float | None, out: Path | None) -> None:
    """Print the plan; with `out`, also write it as JSON.

    Args:
        config: the run's settings.
        gpu: the GPU's memory in 10⁹ bytes; by default that of this machine's GPU.
        out: file to write.

    Raises:
        ValueError, OSError: model or reward is unknown, or the model's configurations cannot be read.
    """
    if gpu is not None and gpu <= 0:
        raise ValueError(f"got --gpu {gpu:g}; expected the GPU's memory in GB, such as 80")
    print(f"reading the configurations of {config.model}", file=sys.stderr)
    backbone = load_skeleton(config.model, revision=config.revision)
    size, fastest = _gpu(gpu)
    planned = plan_run(config, backbone, fastest)
    recomputed = planned.recomputed(size)
    console = Console()
    console.print(_table(planned, recomputed, _title(config, backbone)))
    console.print(_verdict(planned, recomputed, size))
    console.print(_common_gpus(planned))
    for remark in _remarks(config, planned, fastest):
        console.print(remark)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(planned) | {"gpu": size, "recomputed": recomputed, "total": planned.total(recomputed)}
        out.write_text(json.dumps(content, indent=1) + "\n")


def _gpu(given: float | None) -> tuple[int, Tier]:
    """Bytes of the GPU, and its fastest native precision."""
    if torch.cuda.is_available():
        device = torch.device("cuda")
        own = torch.cuda.get_device_properties(device).total_memory
        return int(own if given is None else given * 1e9), fastest_tier(device)
    return int((_ASSUMED_GB if given is None else given) * 1e9), _ASSUMED_TIER


def _title(config: RunConfig, backbone: PipelineBackbone) -> str:
    return f"{config.preset}, {backbone.width}×{backbone.height} px, micro-batches of {config.optimizer.batch}"


def _table(planned: RunMemory, recomputed: int, title: str) -> Table:
    blocks = len(planned.training.kept)
    rows = {_NAMES.get(name, name.replace("_", " ")): size for name, size in planned.weights.items()}
    rows |= {f"reward {name}": size for name, size in planned.rewards.items() if size is not None}
    rows["LoRA weights, gradients and optimiser"] = planned.training.state
    rows |= {f"iteration: {use}": size for use, size in planned.iteration.items()}
    phases = {f"generate: {phase}": size for phase, size in planned.generation.items()}
    phases |= {
        _TRAINING[use].format(kept=blocks - recomputed, recomputed=recomputed): size
        for use, size in planned.training.activations(recomputed).items()
    }
    largest, peak = max(planned.phases(recomputed).items(), key=lambda phase: phase[1])
    table = Table("use", "memory", title=title, title_justify="left")
    table.columns[0].overflow = "fold"
    table.columns[1].justify, table.columns[1].no_wrap = "right", True
    for part in (rows, phases):
        for name, size in part.items():
            if size >= _LEAST:
                table.add_row(name, _size(size))
        table.add_section()
    table.add_row(f"largest phase: {largest}", _size(peak))
    table.add_row("total, with the largest phase", _size(planned.total(recomputed)))
    return table


def _verdict(planned: RunMemory, recomputed: int, gpu: int) -> str:
    blocks, free = len(planned.training.kept), gpu - RESERVED - planned.total(recomputed)
    fits = f"fits, with {_size(free)} to spare" if free >= 0 else f"does not fit: {_size(-free)} are missing"
    set_by = "as optimizer.checkpointing sets" if planned.wanted is not None else "the fewest that fit"
    if planned.wanted is None and free < 0:
        set_by = "all of them"
    return f"On a GPU of {gpu / 1e9:g} GB the run {fits}. {recomputed} of {blocks} blocks recompute, {set_by}."


def _common_gpus(planned: RunMemory) -> Table:
    table = Table("GPU", "blocks that recompute", "total")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, gigabytes in GPUS.items():
        gpu = gigabytes * 10**9
        recomputed = planned.recomputed(gpu)
        total = planned.total(recomputed)
        if total > gpu - RESERVED:
            table.add_row(name, "does not fit", _size(total))
        else:
            table.add_row(name, f"{recomputed} of {len(planned.training.kept)}", _size(total))
    return table


def _remarks(config: RunConfig, planned: RunMemory, fastest: Tier) -> list[str]:
    remarks = [f"Counts tensors only. {_size(RESERVED)} are reserved for CUDA."]
    unknown = [name for name, size in planned.rewards.items() if size is None]
    if unknown:
        remarks.append(f"Rewards whose size is unknown are not counted: {', '.join(unknown)}.")
    if config.uses_service:
        remarks.append("A service explores; `solrl-rollout memory` plans its GPU.")
    elif config.explore.precision == "auto" and config.two_stage:
        remarks.append(f"explore.precision=auto is planned as {fastest}.")
    return remarks


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.1f} MiB"
