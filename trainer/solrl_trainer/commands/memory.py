"""`solrl-train memory`: the GPU memory of a run, planned from its settings and the model's configurations."""

import sys
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.memory_plan import GPUS, RESERVED, bytes_text, gpu_bytes, memory_table
from solrl_core.model_options import size_text
from solrl_core.precision.support import fastest_precision
from solrl_proto.identifiers import Precision

from solrl_trainer.memory.run_memory import MemoryLayout, RunMemory, plan_run, reward_sizes
from solrl_trainer.policy.sharding import SHARDED
from solrl_trainer.settings.config import RunConfig

_ASSUMED_GB = 80.0
_ASSUMED_PRECISION: Precision = "fp8"
"""Memory of the planned GPU if this machine has none: an H100."""
_LEAST = 2**20 // 20
"""Smaller rows are omitted: they would show 0.0 MiB."""
_NAMES = {
    "transformer": "frozen base",
    "vae": "autoencoder",
    "generator": "BF16 generator, merged",
    "explorer": "local explorer's generator",
}
_TRAINING = {
    "kept": "train: activations of {kept} blocks",
    "inputs": "train: inputs of {checkpointed} blocks that recompute",
    "working": "train: backward pass of one block",
}


def plan(config: RunConfig, *, gpu: float | None, gpus: int) -> None:
    """Print the plan of `gpus` GPUs, each with one rank and `gpu` GB (see `gpu_bytes`); None: this machine's GPU.

    An unknown model or reward is a ValueError, a model whose configurations cannot be read an OSError.
    """
    if gpu is not None and gpu <= 0:
        raise ValueError(f"got --gpu {gpu:g}; expected the GPU's memory in GB, such as 80")
    if gpus < 1:
        raise ValueError(f"got --gpus {gpus}; expected at least 1")
    if gpus == 1 and config.optimizer.shard_base is True:
        raise ValueError("optimizer.shard_base is true for one GPU; expected several: --gpus 4")
    print(f"reading the configurations of {config.model}", file=sys.stderr)
    backbone = load_skeleton(config.model, revision=config.revision, size=config.generate.size)
    size, fastest = _gpu(gpu)
    planned = plan_run(config, backbone, fastest, gpus)
    layout = planned.layout(size)
    console = Console(markup=False)
    console.print(_table(planned, layout, _title(config, backbone, gpus)))
    console.print(_verdict(planned, layout, size, gpus))
    console.print(_choices(planned, layout, gpus))
    if not planned.fits(layout, size):
        console.print(_way_out(config, planned, backbone, size))
    console.print(_common_gpus(planned))
    for remark in _remarks(config, planned, fastest):
        console.print(remark)


def _gpu(gigabytes: float | None) -> tuple[int, Precision]:
    if torch.cuda.is_available():
        device = torch.device("cuda")
        installed = torch.cuda.get_device_properties(device).total_memory
        return installed if gigabytes is None else gpu_bytes(gigabytes), fastest_precision(device)
    return gpu_bytes(gigabytes or _ASSUMED_GB), _ASSUMED_PRECISION


def _title(config: RunConfig, backbone: PipelineBackbone, gpus: int) -> str:
    per_gpu = f", each of {gpus} GPUs" if gpus > 1 else ""
    return f"{config.preset}, {size_text(backbone)} px, micro-batches of {config.optimizer.batch}{per_gpu}"


def _table(planned: RunMemory, layout: MemoryLayout, title: str) -> Table:
    blocks, checkpointed = len(planned.training.kept), layout.checkpointed
    part = ", this rank's part" if layout.sharded else ""
    rows = {}
    for name, size in planned.resident_weights(layout).items():
        share = part if name in SHARDED else ""
        rows[_NAMES.get(name, name.replace("_", " ")) + share] = size
    rows |= {f"reward {name}": size for name, size in planned.rewards.items() if size is not None}
    rows["LoRA weights, gradients and optimiser"] = planned.training.state
    rows |= {f"iteration: {use}": size for use, size in planned.iteration.items()}
    every = planned.phases(layout)
    phases = {f"generate: {phase}": every[phase] for phase in planned.generation}
    if layout.sharded:
        phases["train: weights of the block at work"] = planned.gathered
    phases |= {
        _TRAINING[use].format(kept=blocks - checkpointed, checkpointed=checkpointed): size
        for use, size in planned.training.activations(checkpointed).items()
    }
    largest, peak = max(every.items(), key=lambda phase: phase[1])
    large = ({use: size for use, size in part.items() if size >= _LEAST} for part in (rows, phases))
    total = {f"largest phase: {largest}": peak, "total, with the largest phase": planned.total(layout)}
    return memory_table(title, *large, total)


def _verdict(planned: RunMemory, layout: MemoryLayout, gpu: int, gpus: int) -> str:
    blocks, free = len(planned.training.kept), gpu - RESERVED - planned.total(layout)
    fits = f"fits, with {bytes_text(free)} to spare" if free >= 0 else f"does not fit: {bytes_text(-free)} are missing"
    set_by = (
        "as optimizer.activation_checkpointing sets"
        if planned.settings.checkpointed is not None
        else "the fewest that fit"
    )
    if planned.settings.checkpointed is None and free < 0:
        set_by = "all of them" if layout.checkpointed == blocks else "as training allows"
    on = f"a GPU of {bytes_text(gpu)}" if gpus == 1 else f"{gpus} GPUs of {bytes_text(gpu)}"
    return f"On {on} the run {fits}. {layout.checkpointed} of {blocks} blocks recompute, {set_by}."


def _choices(planned: RunMemory, layout: MemoryLayout, gpus: int) -> str:
    settings = planned.settings
    where = "in host memory, except while prompts are encoded" if layout.offloaded else "on the GPU"
    choices = [f"Text encoders stay {where}{_because(settings.offloaded, 'optimizer.encoders')}."]
    if gpus > 1:
        how = f"sharded across the {gpus} ranks" if layout.sharded else "whole on each GPU"
        choices.append(f"The base is {how}{_because(settings.sharded, 'optimizer.shard_base')}.")
    return " ".join(choices)


def _way_out(config: RunConfig, planned: RunMemory, backbone: PipelineBackbone, gpu: int) -> str:
    """Settings that make a run fit: a smaller micro-batch, rewards in BF16, or both."""
    batch = config.optimizer.batch
    if largest := planned.largest_batch(batch, gpu):
        return f"It fits with optimizer.batch={largest}."
    narrow = {
        name: {**config.reward_options.get(name, {}), "dtype": "bfloat16"}
        for name, size in planned.rewards.items()
        if size
    }
    sizes = reward_sizes(config.model_copy(update={"reward_options": narrow}), backbone.options.rewards)
    if largest := replace(planned, rewards=sizes).largest_batch(batch, gpu):
        options = "reward_options={" + ", ".join(f"{name}: {{dtype: bfloat16}}" for name in narrow) + "}"
        smaller = f" and optimizer.batch={largest}" if largest < batch else ""
        return f"It fits with {options}{smaller}."
    return "No micro-batch fits."


def _because(value: bool | None, setting: str) -> str:
    return "" if value is None else f", as {setting} sets"


def _common_gpus(planned: RunMemory) -> Table:
    table = Table("GPU", "blocks that recompute", "text encoders", "total")
    for column in table.columns[1:]:
        column.justify = "right"
    for gigabytes, (names, _) in GPUS.items():
        name, gpu = f"{gigabytes:g} GB ({names})", gpu_bytes(gigabytes)
        layout = planned.layout(gpu)
        total = bytes_text(planned.total(layout))
        if not planned.fits(layout, gpu):
            table.add_row(name, "does not fit", "", total)
        else:
            blocks = f"{layout.checkpointed} of {len(planned.training.kept)}"
            table.add_row(name, blocks, "host memory" if layout.offloaded else "GPU", total)
    return table


def _remarks(config: RunConfig, planned: RunMemory, fastest: Precision) -> list[str]:
    remarks = [f"Counts tensors only. {bytes_text(RESERVED)} are reserved for CUDA."]
    unknown = [name for name, size in planned.rewards.items() if size is None]
    if unknown:
        remarks.append(f"Rewards whose size is unknown are not counted: {', '.join(unknown)}.")
    explored = fastest if config.explore.precision == "auto" else config.explore.precision
    if config.uses_service:
        remarks.append(f"A service explores; `solrl-rollout memory --precision {explored}` plans it.")
    elif config.explore.precision == "auto" and config.two_stage:
        remarks.append(f"explore.precision=auto is planned as {fastest}.")
    return remarks
