"""The adapter file: safetensors bytes in PEFT's key format, float32, with `r` and `lora_alpha` as metadata.

A decoded adapter has tensors for every LoRA target of its model. An adapter for only some or none of them is refused,
because it would silently do nothing.
"""

import json
import math
import mmap
import re
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import safetensors
import safetensors.torch
import torch
from solrl_proto.adapters import AdapterFile

from solrl_core.errors import AdapterError

MAX_HEADER_BYTES = 4 * 2**20
"""A FLUX.1 adapter's header is 0.2 MiB."""

_RANK = re.compile(r"[1-9][0-9]{0,5}")
_ALPHA = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,3})?")
_SHOWN = 200  # largest number of characters of a foreign name in an error
warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to a decoded adapter


def lora_a_key(module: str) -> str:
    """Name of the [rank, in] tensor of `module`."""
    return f"base_model.model.{module}.lora_A.weight"


def lora_b_key(module: str) -> str:
    """Name of the [out, rank] tensor of `module`."""
    return f"base_model.model.{module}.lora_B.weight"


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter. `tensors` maps PEFT keys to float32 tensors: lora_A [rank, in], lora_B [out, rank]."""

    rank: int
    alpha: float
    tensors: dict[str, torch.Tensor]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules the adapter binds, sorted."""
        head, tail = lora_a_key("\0").split("\0")
        return tuple(sorted(k.removeprefix(head).removesuffix(tail) for k in self.tensors if k.endswith(tail)))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def to(self, device: torch.device) -> "Adapter":
        """The same adapter with its tensors on `device`."""
        return replace(self, tensors={key: tensor.to(device) for key, tensor in self.tensors.items()})

    def delta(self, module: str) -> torch.Tensor:
        """The change to the weight of `module`, scale · B · A: float32 [out, in]. KeyError if it is not bound."""
        return self.scale * (self.tensors[lora_b_key(module)] @ self.tensors[lora_a_key(module)])


class EncodedAdapter(AdapterFile):
    """The bytes of an adapter file, with the adapter in host memory, which its writer need not parse again."""

    adapter: Adapter


def encode_adapter(adapter: Adapter) -> EncodedAdapter:
    """Encode an adapter as a file; equal tensors, rank and alpha give equal bytes.

    Raises AdapterError `dtype` for a tensor that is not float32; casting is left to the caller.
    """
    for key, tensor in adapter.tensors.items():
        if tensor.dtype != torch.float32:
            raise _bad_dtype(key, str(tensor.dtype))
    copies = {key: adapter.tensors[key].detach().to("cpu", copy=True).contiguous() for key in sorted(adapter.tensors)}
    # safetensors.torch.save would copy the file twice, and orders metadata differently from call to call.
    header: dict[str, Any] = {"__metadata__": {"lora_alpha": repr(float(adapter.alpha)), "r": str(adapter.rank)}}
    end = 0
    for key, tensor in copies.items():
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = (tensor.numpy().data for tensor in copies.values())
    file = EncodedAdapter(b"".join((len(text).to_bytes(8, "little"), text, *parts)))
    file.adapter = replace(adapter, tensors=copies)  # views of the file would keep it for ever
    return file


def encode_for_diffusers(adapter: Adapter) -> bytes:
    """Encode an adapter as a file for `load_lora_weights` of the model's diffusers pipeline.

    diffusers names modules `transformer.…` and, without metadata, takes alpha to be the rank; so lora_B is written
    multiplied by alpha / rank. `decode_adapter` refuses such a file.
    """
    tensors = {}
    for module in adapter.modules:
        tensors[f"transformer.{module}.lora_A.weight"] = adapter.tensors[lora_a_key(module)]
        tensors[f"transformer.{module}.lora_B.weight"] = adapter.tensors[lora_b_key(module)] * adapter.scale
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    file: bytes = safetensors.torch.save(copies, metadata={"format": "pt"})
    return file


def decode_adapter(body: bytes, layout: Mapping[str, tuple[int, int]]) -> Adapter:
    """Read an adapter file and check that it binds every module of `layout`; the tensors are views of `body`.

    Args:
        body: the file's bytes.
        layout: every LoRA target of the model: module name to (out_features, in_features).

    Raises:
        AdapterError: names the tensor or metadata field at fault.
    """
    header = _parse(body)
    metadata = header.pop("__metadata__", None) or {}
    rank = int(_metadata(metadata, "r", _RANK, "a whole number from 1 to 999999, as a decimal string"))
    expects = "a positive, finite decimal string"
    alpha = float(_metadata(metadata, "lora_alpha", _ALPHA, expects))
    if not (math.isfinite(alpha) and alpha > 0):
        raise _bad_metadata("lora_alpha", metadata["lora_alpha"], expects)

    shapes: dict[str, list[int]] = {}
    for module, (out_features, in_features) in layout.items():
        shapes[lora_a_key(module)] = [rank, in_features]
        shapes[lora_b_key(module)] = [out_features, rank]
    _check_keys(header.keys(), shapes, len(layout))

    for key in sorted(shapes):
        if (dtype := header[key]["dtype"]) != "F32":
            raise _bad_dtype(key, dtype)
        if (shape := header[key]["shape"]) != shapes[key]:
            detail = "a tensor does not fit its module"
            action = "check that the adapter is for this model, and that metadata r is its rank"
            raise AdapterError("shape", detail, where=key, got=shape, expected=shapes[key], action=action)
    adapter = view_adapter(body)
    for key, tensor in sorted(adapter.tensors.items()):
        if bad := int((~torch.isfinite(tensor)).sum()):
            got = f"{bad} of {tensor.numel()} values NaN or infinite"
            action = "find the training step that diverged; resume from the version before it"
            detail, expected = "a tensor is not finite", "finite values only"
            raise AdapterError("nonfinite", detail, where=key, got=got, expected=expected, action=action)
    return adapter


def view_adapter(body: mmap.mmap | bytes) -> Adapter:
    """An adapter whose tensors are views of a file in memory that `decode_adapter` accepts; nothing is checked."""
    start = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:start])
    metadata = header.pop("__metadata__")
    tensors = {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        values = torch.frombuffer(body, dtype=torch.float32, count=(end - begin) // 4, offset=start + begin)
        tensors[key] = (values.clone() if start % 4 else values).reshape(entry["shape"])  # foreign headers may misalign
    return Adapter(rank=int(metadata["r"]), alpha=float(metadata["lora_alpha"]), tensors=tensors)


def _parse(body: bytes) -> dict[str, Any]:
    """Parse and check the header: tensors (dtype, shape, data_offsets), and perhaps `__metadata__`."""
    length = int.from_bytes(body[:8], "little")
    if length > min(MAX_HEADER_BYTES, len(body) - 8):
        expected = f"a header within the file, of at most {MAX_HEADER_BYTES} bytes"
        raise _malformed(f"a header of {length} bytes in a file of {len(body)}", expected)
    try:
        safetensors.deserialize(body)  # type: ignore[no-untyped-call]
        return dict(json.loads(body[8 : 8 + length]))
    except Exception as error:
        raise _malformed(str(error)[:_SHOWN], "a complete safetensors file") from None


def _metadata(metadata: dict[str, str], name: str, pattern: re.Pattern[str], expected: str) -> str:
    text = metadata.get(name)
    if text is None or not pattern.fullmatch(text):
        raise _bad_metadata(name, text, expected)
    return text


def _check_keys(present: Set[str], shapes: Mapping[str, list[int]], modules: int) -> None:
    """Refuse unless the names of the tensors are exactly the names in `shapes`."""
    missing = sorted(shapes.keys() - present)
    extra = sorted(present - shapes.keys())
    if len(missing) == len(shapes):
        fault = f"the adapter binds none of the model's {modules} LoRA target modules"
    elif extra:
        fault = f"{len(extra)} tensors belong to no LoRA target of the model"
    elif missing:
        fault = f"{len(missing)} of the {len(shapes)} tensors are missing; a partial bind is refused"
    else:
        return
    raise AdapterError(
        "keys",
        fault,
        where=(extra or missing)[0][:_SHOWN] if extra or missing else None,
        got=[key[:_SHOWN] for key in extra[:5]] or f"{len(present)} tensors",
        expected=missing[:5] or f"{len(shapes)} tensors",
        action="write lora_A and lora_B of every LoRA target, named base_model.model.{module}.lora_A.weight",
    )


def _malformed(got: str, expected: str) -> AdapterError:
    action = "send the file again; if the error repeats, write the file again with encode_adapter"
    return AdapterError("malformed", "the body is not a safetensors file", got=got, expected=expected, action=action)


def _bad_metadata(name: str, got: str | None, expected: str) -> AdapterError:
    return AdapterError(
        "metadata",
        f"metadata {name!r} is missing or out of range",
        where=f"__metadata__.{name}",
        got=got and got[:_SHOWN],
        expected=expected,
        action="write r and lora_alpha into the safetensors metadata",
    )


def _bad_dtype(key: str, got: str) -> AdapterError:
    action = "cast the LoRA weights with .float() before encoding"
    return AdapterError("dtype", "adapter tensors travel in float32", where=key, got=got, expected="F32", action=action)
