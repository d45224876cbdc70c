"""Memory plans of a model without its weights, by running the serving code on the meta device."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from solrl_core.families.backbone import PROMPT_CACHE_BYTES
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import Meta
from solrl_core.sampling.generator import Generator

GPUS: Mapping[float, tuple[str, float]] = {
    24: ("RTX 4090", 23.6),
    48: ("L40S", 44.4),
    80: ("A100, H100", 79.1),
    141: ("H200", 139.7),
    192: ("B200", 178.3),
}
"""Common GPUs: GB in their names → who has them, and the GiB that CUDA reports there; error messages quote these."""
RESERVED = 2 * 2**30
"""Bytes reserved for CUDA's context, its libraries' workspaces and fragmentation."""
_GRANULE = 512
"""CUDA's allocator rounds up to this many bytes."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a rollout service needs on its device.

    Attributes:
        weights: part → bytes; "transformer" is the clean base, "served, bf16" what its generator in BF16 adds,
            "packed decoder" the copies of weights that its kernels take on a GPU, from Hopper on.
        prompts: the most that the cache of encoded prompts takes.
        activations: phase → peak bytes beyond the weights, at `batch` candidates.
        batch: candidates in one batch.
        per_candidate: phase → growth of its peak with one more candidate.
    """

    weights: dict[str, int]
    prompts: int
    activations: dict[str, int]
    batch: int
    per_candidate: dict[str, int]

    @property
    def total(self) -> int:
        """Weights, encoded prompts and the largest phase."""
        return self._resident_bytes + max(self.activations.values())

    @property
    def _resident_bytes(self) -> int:
        return sum(self.weights.values()) + self.prompts

    def largest_batch(self, limit: int) -> int:
        """Largest number of candidates in a batch that fits in `limit` bytes; 0 if none fits."""
        free = limit - self._resident_bytes
        batches = [
            self.batch + (free - self.activations[phase]) // max(1, growth)
            for phase, growth in self.per_candidate.items()
        ]
        return max(0, min(batches))


def memory_table(title: str, *sections: Mapping[str, int]) -> Table:
    """Table of a plan: use → bytes."""
    table = Table("use", "memory", title=title, title_justify="left")
    table.columns[0].overflow = "fold"
    table.columns[1].justify, table.columns[1].no_wrap = "right", True
    for section in sections:
        for use, size in section.items():
            table.add_row(use, bytes_text(size))
        table.add_section()
    return table


def gpu_bytes(gigabytes: float) -> int:
    """Bytes that CUDA reports on a GPU with so many GB; of a size that `GPUS` lacks, 10⁹ per GB."""
    return int(GPUS[gigabytes][1] * 2**30 if gigabytes in GPUS else gigabytes * 1e9)


def bytes_text(size: int) -> str:
    """Bytes in the largest unit that gives at least 1, such as 1.50 GiB."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if size >= 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size / 2**10:.2f} KiB"


@contextmanager
def fitting(backbone: PipelineBackbone) -> Iterator[None]:
    """Raise ValueError for any failure in the block, which runs a model whose configurations may not fit together."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"the configurations of {backbone.name} do not fit together, a pass fails: {error}; get them again from "
            "the model's authors"
        ) from error


def plan_memory(backbone: PipelineBackbone, precisions: Iterable[str], batch: int) -> MemoryPlan:
    """Plan a service of this model on the meta device (see `load_skeleton`), with `batch` candidates in one batch.

    A service keeps a generator per precision. They share the clean base, and one of them works at a time.

    It counts tensors. CUDA's own context (about 0.5 GiB) and the workspaces of its libraries come on top.

    Raises:
        ValueError: the model's configurations do not fit together.
    """
    with fitting(backbone):
        generators = [Generator(backbone, precision) for precision in precisions]
        served = {f"served, {generator.precision}": generator.transformer for generator in generators}
        weights = weight_bytes({**modules_of(backbone), **served})
        packed = weight_bytes({"": backbone.parts["vae"], "packed decoder": backbone.with_fused_decoder()})
        if packed["packed decoder"]:
            weights["packed decoder"] = packed["packed decoder"]
        phases = {size: generation_peaks(generators, size) for size in (batch, 2 * batch)}
    growth = {phase: (peak - phases[batch][phase]) // batch for phase, peak in phases[2 * batch].items()}
    return MemoryPlan(weights, PROMPT_CACHE_BYTES, phases[batch], batch, growth)


def modules_of(backbone: PipelineBackbone) -> dict[str, nn.Module]:
    """The parts of a model that have weights, by name."""
    return {name: part for name, part in backbone.parts.items() if isinstance(part, nn.Module)}


def weight_bytes(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Bytes of each module's weights; shared weights count for the first module that has them."""
    counted: set[int] = set()
    return {name: _new_bytes(_tensors(module), counted) for name, module in modules.items()}


def generation_peaks(generators: Sequence[Generator], batch: int, guidance: float = 1.0) -> dict[str, int]:
    """Peak bytes of each phase of generating `batch` candidates, in addition to the weights, on the meta device.

    Denoising is one phase per generator. The generators have one backbone, whose decoder's norms are replaced for
    counting, so the model cannot generate afterwards.
    """
    backbone = generators[0].backbone
    _fuse_norms(backbone.parts["vae"].get_submodule("decoder"))
    with Meta(), _FusedAttention(), torch.inference_mode():
        row = backbone.encode(["a"], guidance)
        with PeakBytes() as encode:
            backbone.encode(["a"], guidance)
        latents = torch.empty(batch, *backbone.latent_shape, device="meta")
        conditioning = {name: tensor.expand(batch, *tensor.shape[1:]).clone() for name, tensor in row.items()}
        input_bytes = _new_bytes([latents, *conditioning.values()], set())
        peaks = {"encode": encode.peak}
        for generator in generators:
            with PeakBytes() as denoise:
                sigma = torch.ones(batch, device="meta")
                backbone.velocity(generator.transformer, latents, sigma, conditioning, guidance)
            peaks[f"denoise, {generator.precision}"] = input_bytes + denoise.peak
        with PeakBytes() as decode:
            generators[0].decode(latents, batch)
    return {**peaks, "decode": input_bytes + decode.peak}


def _fuse_norms(decoder: nn.Module) -> None:
    """Replace norms by an allocation of their output: compiled for a GPU, they keep no float32 copy of their input."""
    from diffusers.models.normalization import RMSNorm

    for module in decoder.modules():
        if isinstance(module, RMSNorm):
            module.forward = torch.empty_like


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are created within it and live at the same time.

    Attributes:
        peak: the largest count so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _key(tensor) not in inputs:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._live.setdefault(_key(tensor), (reference, _rounded(storage.nbytes())))
        self._live = {
            key: value
            for key, value in self._live.items()
            if not value[0].expired()  # type: ignore[no-untyped-call]
        }
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


class _FusedAttention(TorchFunctionMode):
    """Fused attention, as on a GPU: it never stores the scores, which are quadratic in the tokens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            arguments = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            query, value = arguments["query"], arguments["value"]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _new_bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Bytes of the storages that are not in `counted`; adds the storages to it."""
    total = 0
    for tensor in tensors:
        if _key(tensor) not in counted:
            counted.add(_key(tensor))
            total += _rounded(tensor.untyped_storage().nbytes())
    return total


def _rounded(size: int) -> int:
    return -(-size // _GRANULE) * _GRANULE
