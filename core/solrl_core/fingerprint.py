"""Digests of everything that turns a seed into an image and its score, equal wherever the same values are loaded.

They cover the values of weights and settings, not the arithmetic: precision, device and a reward's dtype are left out.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from solrl_proto.text_files import read_json
from torch import Tensor, nn

from solrl_core.errors import MismatchError

# Written by loaders, and different for the same model loaded from another place.
_IGNORED_SETTINGS = {"_name_or_path", "_diffusers_version", "transformers_version", "dtype", "torch_dtype"}

_ROW = 4096
"""Values that are hashed to one sum."""
_ROWS_AT_ONCE = 4096
"""Bounds the temporary memory: about 10 bytes per value."""

SCHEDULE = "schedule"
"""The noise levels that this process's libraries compute, among digests of parts."""
_SCHEDULE_STEPS = (5, 10, 28)
_SCHEDULE_DIGITS = 4
"""Decimals that count, because two ways of writing one formula differ by rounding."""


def combined_digest(*parts: str) -> str:
    """One digest over several strings."""
    return "sha256:" + hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _settings(config: Any) -> str:
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return json.dumps(_without_ignored(values), sort_keys=True, default=str)


def _without_ignored(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _without_ignored(v) for k, v in value.items() if k not in _IGNORED_SETTINGS}
    return value


def module_digest(module: nn.Module, device: torch.device | None = None) -> str:
    """Digest of a module's class, configuration and weights, the weights rounded to bfloat16.

    It detects different weights, but not weights constructed to have a given digest. `device` computes it; by default,
    each weight's own.
    """
    return _module_digest(
        module, {name: _tensor_digest(tensor.to(device)) for name, tensor in module.state_dict().items()}
    )


def checkpoint_digest(module: nn.Module, folder: Path, device: torch.device) -> str:
    """`module_digest` of a module on the meta device with the weights in its folder, read one at a time.

    The folder is its part of a model in diffusers format, with safetensors files. `device` sums the weights.

    Raises:
        ValueError: the files have other weights than the module.
        OSError: there are no safetensors files.
    """
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    single = folder / "diffusion_pytorch_model.safetensors"
    files = {folder / name for name in read_json(index)["weight_map"].values()} if index.is_file() else ()
    digests: dict[str, str] = {}
    for file in sorted(files or (single,)):
        with safe_open(file, framework="pt") as weights:
            digests |= {name: _tensor_digest(weights.get_tensor(name).to(device)) for name in weights.keys()}  # noqa: SIM118
    if odd := sorted(digests.keys() ^ module.state_dict().keys()):
        raise ValueError(
            f"{folder}: the files and {type(module).__name__} differ by {len(odd)} weights, such as {odd[0]}; expected "
            "a model saved by this version of diffusers"
        )
    return _module_digest(module, digests)


def _module_digest(module: nn.Module, weights: Mapping[str, str]) -> str:
    settings = _settings(module.config) if hasattr(module, "config") else ""
    return combined_digest(
        type(module).__name__, settings, *(f"{name} {digest}" for name, digest in sorted(weights.items()))
    )


def _tensor_digest(tensor: Tensor) -> str:
    """Digest of one tensor, summed on its own device: on a GPU this is faster than copying it for SHA-256."""
    # Flat, because a channels-last tensor may count as contiguous and have another last stride.
    values = tensor.detach().to(torch.bfloat16).contiguous().flatten().view(torch.int16)
    while len(values) > _ROW:
        values = torch.cat([_sums(part) for part in torch.split(values, _ROW * _ROWS_AT_ONCE)]).view(torch.int16)
    return hashlib.sha256(str(tuple(tensor.shape)).encode() + values.cpu().numpy().tobytes()).hexdigest()


def _sums(values: Tensor) -> Tensor:
    """Sums modulo 2^64, one per row of int16 values, of the values times fixed odd numbers.

    Source: multilinear hashing, Carter & Wegman 1979; integers, so that every device sums to the same.
    """
    rows = nn.functional.pad(values, (0, -len(values) % _ROW)).view(-1, _ROW)
    return rows.long().mul_(_factors(values.device)).sum(1)


@cache
def _factors(device: torch.device) -> Tensor:
    stretched = hashlib.shake_256(b"solrl").digest(8 * _ROW)
    return (torch.frombuffer(bytearray(stretched), dtype=torch.int64) | 1).to(device)


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of a fast tokenizer's whole definition."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    # Settings of the last call: a used tokenizer would differ from a new one.
    definition.update(truncation=None, padding=None)
    return combined_digest(type(tokenizer).__name__, json.dumps(definition, sort_keys=True))


def source_digest(target: Any) -> str:
    """Digest of the file that defines a function, class or instance; any edit of the file changes it.

    Raises:
        OSError: the source is not on this machine.
        TypeError: the object is built-in.
    """
    definition = target if hasattr(target, "__qualname__") else getattr(target, "func", type(target))
    return combined_digest(inspect.getsource(inspect.getmodule(definition) or definition))


def schedule_digest(sigmas: Callable[[int], list[float]]) -> str:
    """Digest of the noise levels of a model at its default size, for some numbers of steps.

    The scheduler's own digest covers its configuration. Another version of diffusers may compute other levels from it.
    """
    levels = [[round(sigma, _SCHEDULE_DIGITS) + 0.0 for sigma in sigmas(steps)] for steps in _SCHEDULE_STEPS]
    return combined_digest(json.dumps(levels))


def part_digests(parts: Mapping[str, Any], device: torch.device | None = None) -> dict[str, str]:
    """Digest of each part of a backbone: module, tokenizer, or anything with a `config`; see `module_digest`."""
    return {name: _part_digest(part, device) for name, part in parts.items()}


def _part_digest(part: Any, device: torch.device | None) -> str:
    if isinstance(part, nn.Module):
        return module_digest(part, device)
    if hasattr(part, "backend_tokenizer"):
        return tokenizer_digest(part)
    return combined_digest(type(part).__name__, _settings(part.config))


def model_digest(digests: Mapping[str, str]) -> str:
    """Digest of all parts that generate images, without rewards, and without the schedule, which they determine."""
    return fingerprint({part: digest for part, digest in digests.items() if part != SCHEDULE}, ())


def fingerprint(digests: Mapping[str, str], rewards: Iterable[str]) -> str:
    """Digest of all parts that generate images, and of the named rewards."""
    reward_parts = {f"reward:{name}" for name in rewards}
    parts = (
        f"{part} {digest}" for part, digest in digests.items() if part in reward_parts or not part.startswith("reward:")
    )
    return combined_digest(*sorted(parts))


def check_digests(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Refuse a service that would generate different images, or score them differently.

    Raises:
        MismatchError: naming the first part of ours that differs there or is missing.
    """
    for part, digest in ours.items():
        if theirs.get(part) != digest:
            raise MismatchError(
                "digests",
                f"the service's {part} is not the trainer's: it would rank images that are never trained on",
                where=part,
                got=theirs.get(part, "nothing"),
                expected=digest,
                action=_how_to_match(part),
            )


def _how_to_match(part: str) -> str:
    """Advice on a part that differs: how both sides come to load the same."""
    kind, _, name = part.partition(":")
    if part == SCHEDULE:
        return "use the same version of diffusers on both sides, since it computes other noise levels"
    if kind != "reward":
        return f"load the same {part} on both sides (same model and revision)"
    return (
        f"restart the service if {name} was edited since it started: it computes what it loaded then; otherwise load "
        f"the same {name} on both sides (same code, weights and options)"
    )
