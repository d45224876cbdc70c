"""`solrl-rollout memory`: a model's memory on a GPU, planned from its configurations alone."""

import json
import sys

from rich.console import Console
from rich.table import Table
from solrl_core.families.skeleton import load_skeleton
from solrl_core.memory_plan import GPUS, RESERVED, MemoryPlan, bytes_text, gpu_bytes, memory_table, plan_memory
from solrl_core.model_options import size_text

from solrl_rollout.options import ServingMemory


def plan(options: ServingMemory) -> None:
    """Print the plan of a service at these precisions; with `out`, also write it as JSON.

    Raises:
        ValueError, OSError: the model is unknown or its configurations cannot be read.
    """
    model, batch, out = options.model, options.batch, options.out
    precisions = list(dict.fromkeys(options.precision))
    if not precisions:
        raise ValueError("got --precision without a value; expected one or several, such as --precision fp8 bf16")
    if batch < 1:
        raise ValueError(f"got a batch of {batch}; expected at least 1")
    print(f"reading the configurations of {model}", file=sys.stderr)
    backbone = load_skeleton(model, revision=options.revision, size=options.size)
    planned = plan_memory(backbone, precisions, batch)
    console = Console(markup=False)
    served = " and ".join(precisions)
    console.print(_table(planned, f"{model}, {served}, {size_text(backbone)}, batch {batch}"))
    console.print(_limits(planned))
    console.print(
        f"Counts tensors only. Batch limits reserve {bytes_text(RESERVED)} for CUDA; reward models need more."
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(vars(planned) | {"total": planned.total}, indent=1) + "\n", encoding="utf-8")


def _table(planned: MemoryPlan, title: str) -> Table:
    weights = {f"weights: {name}": size for name, size in planned.weights.items()}
    activations = {f"activations: {name}": size for name, size in planned.activations.items()}
    total = {"total (weights, prompts and the largest phase)": planned.total}
    return memory_table(title, weights | {"encoded prompts, at most": planned.prompts} | activations, total)


def _limits(planned: MemoryPlan) -> Table:
    table = Table("GPU", "largest batch")
    table.columns[1].justify = "right"
    for size, (names, _) in GPUS.items():
        largest_batch = planned.largest_batch(gpu_bytes(size) - RESERVED)
        table.add_row(f"{size:g} GB ({names})", str(largest_batch) if largest_batch else "does not fit")
    return table
