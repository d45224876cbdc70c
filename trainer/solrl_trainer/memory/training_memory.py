"""Memory plan of the training phase: the blocks that keep their activations. Planning needs no GPU.

Each kind of block is compiled on the meta device, where tensors have shapes but no values, up to the partition into
forward and backward pass. The activations that this partition saves are counted.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from solrl_core.families import Backbone, Conditioning
from solrl_core.families.backbone import PROMPT_CACHE_BYTES
from solrl_core.families.pipeline import meta_copy
from solrl_core.families.skeleton import Meta
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from solrl_trainer.algorithms.registry import make_algorithm
from solrl_trainer.policy.lora import chosen_layers, inject
from solrl_trainer.policy.policy import CheckpointWrapper, wrap_blocks
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.training_sections import Lora

_STATE = 24
"""Bytes per LoRA weight: two policies, two moments, the accumulated gradient, and the gradient of a micro-batch."""
_ALWAYS = 2**20
"""More compilations than any process plans."""


@dataclass(frozen=True)
class TrainingPlan:
    """Bytes that training needs in addition to the frozen weights.

    Attributes:
        kept: per block, in execution order: bytes that it keeps for the backward pass.
        inputs: per block: bytes that it keeps if it is checkpointed.
        state: LoRA weights of both policies, gradients, and the optimiser's moments.
    """

    kept: tuple[int, ...]
    inputs: tuple[int, ...]
    state: int

    def total(self, checkpointed: int) -> int:
        """Peak bytes with this many checkpointed blocks, the first ones."""
        return self.state + sum(self.activations(checkpointed).values())

    def activations(self, checkpointed: int) -> dict[str, int]:
        """Bytes by use at that peak: of blocks that keep activations, checkpointed blocks, and the block at work."""
        return {
            "kept": sum(self.kept[checkpointed:]),
            "inputs": sum(self.inputs[:checkpointed]),
            "working": max(self.kept) * (2 if checkpointed else 1),
        }

    def scaled(self, share: float) -> "TrainingPlan":
        """The plan of a micro-batch of another size, given as the share of this one's."""
        kept, inputs = (tuple(math.ceil(share * size) for size in sizes) for sizes in (self.kept, self.inputs))
        return TrainingPlan(kept, inputs, self.state)

    def checkpointed(self, limit: int) -> int:
        """The fewest checkpointed blocks that stay within `limit` bytes; all blocks if no count fits."""
        blocks = len(self.kept)
        return next((count for count in range(blocks) if self.total(count) <= limit), blocks)


def plan_training(
    backbone: Backbone, lora: Lora, batch: int, conditioning: Conditioning, guidance: float = 1.0
) -> TrainingPlan:
    """Plan the memory of training a model without an injected policy, on any device; it is not modified.

    A backward pass has `batch` samples, and `conditioning` is one row, an encoded prompt.
    """
    meta = _on_meta(backbone)
    getattr(meta, "fuse", lambda transformer: None)(meta.transformer)
    with torch.random.fork_rng(devices=[]):
        chosen = chosen_layers(meta.transformer, meta.lora_targets, lora.targets)
        layers = inject(meta.transformer, chosen, lora.rank, lora.alpha).values()
    blocks = wrap_blocks(meta.transformer, meta)
    latents = torch.empty(batch, *meta.latent_shape, device="meta")
    rows = {
        name: torch.empty(batch, *row.shape[1:], dtype=row.dtype, device="meta") for name, row in conditioning.items()
    }
    # With guidance, a family may run each block twice.
    calls: dict[CheckpointWrapper, list[tuple[Any, Any]]] = {block: [] for block in blocks}
    for block in blocks:
        block.register_forward_pre_hook(
            lambda block, args, kwargs: calls[block].append((args, kwargs)), with_kwargs=True
        )
    with torch.no_grad(), Meta():
        meta.velocity(meta.transformer, latents, torch.ones(batch, device="meta"), rows, guidance)
    counted: dict[Any, tuple[int, int]] = {}

    def count_of(inner: nn.Module, args: Any, kwargs: Any) -> tuple[int, int]:
        kind = (
            type(inner),
            *(weight.shape for weight in inner.parameters()),
            *map(_shape, tree_leaves((args, kwargs))),
        )
        if kind not in counted:
            counted[kind] = _count(inner, args, kwargs)
        return counted[kind]

    sizes = [[count_of(block.block, *call) for call in passes] for block, passes in calls.items()]
    kept = tuple(sum(kept for kept, _ in passes) for passes in sizes)
    inputs = tuple(sum(inputs for _, inputs in passes) for passes in sizes)
    return TrainingPlan(kept, inputs, _STATE * sum(weight.numel() for layer in layers for weight in layer.current))


def iteration_bytes(config: RunConfig, backbone: Backbone, row: Conditioning) -> dict[str, int]:
    """Bytes of an iteration's samples, of its encoded prompts, and of a full cache of encoded prompts.

    `row` is an encoded prompt.
    """
    explore = config.explore
    latents = 4 * math.prod(backbone.latent_shape)
    steps = config.regenerate.steps if config.two_stage else explore.steps
    recorded = make_algorithm(config.algorithm).trains_on.recorded
    # Samples are held once by group, and once in the order of all prompts.
    samples = 2 * explore.keep * latents * (1 + (steps + 1) * recorded) * explore.prompts
    prompts = explore.prompts * sum(tensor.nbytes for tensor in row.values())
    return {"samples": samples, "prompts": prompts, "cached prompts": max(PROMPT_CACHE_BYTES, prompts)}


def _on_meta(backbone: Backbone) -> Backbone:
    """The backbone with a copy of its transformer on the meta device."""
    meta = copy.copy(backbone)
    meta.transformer = meta_copy(backbone.transformer)
    meta.device = torch.device("meta")
    return meta


def _count(block: nn.Module, args: Any, kwargs: Any) -> tuple[int, int]:
    """Bytes that a block keeps for its backward pass, and the bytes of its inputs alone."""
    args, kwargs = tree_map(lambda x: x.detach().requires_grad_() if _is_stream(x) else x, (args, kwargs))
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    streams = {_key(x): x.untyped_storage().nbytes() for x in tensors if _is_stream(x)}
    elsewhere = {_key(x) for x in (*block.parameters(), *block.buffers(), *tensors)}
    saved: dict[int, tuple[Tensor, int]] = {}

    def pack(x: Tensor) -> Tensor:
        if _key(x) not in elsewhere:
            saved[_key(x)] = x, x.untyped_storage().nbytes()
        return x

    compiled = torch.compile(block, dynamic=False, backend=_partitioned())
    # Beyond the limit a block would run uncompiled, which keeps more; each planned batch size compiles it once.
    compile_always = torch._dynamo.config.patch(recompile_limit=_ALWAYS, accumulated_recompile_limit=_ALWAYS)
    with compile_always, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = compiled(*args, **kwargs)
    del output
    inputs = sum(streams.values())
    return inputs + sum(size for _, size in saved.values()), inputs


def _partitioned() -> Callable[..., Any]:
    """A compiler backend that partitions forward and backward pass like torch's default, and compiles neither."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def as_it_is(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend: Callable[..., Any] = partial(
        aot_autograd(
            fw_compiler=as_it_is,
            bw_compiler=as_it_is,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
    )
    return backend


def _is_stream(x: Any) -> bool:
    """Whether an input is tokens [B, S, C], the output of the previous block."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _shape(x: Any) -> Any:
    return x.shape if isinstance(x, Tensor) else x
