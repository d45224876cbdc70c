"""The file of an adapter version, made from the LoRA weights of any trainer; needs numpy, and no safetensors."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAME = re.compile(
    r"(?:base_model\.model\.|transformer\.)*(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>\w+))?\.weight"
)
_FURTHER = re.compile(r"\.(?:lora_\w+|modules_to_save|token_adapter)(?:\.(?P<next>\w+)|$)")
"""What PEFT trains beside lora_A and lora_B, such as DoRA's magnitudes; of one adapter, whose name is next, if any."""


def adapter_file(
    weights: Mapping[str, Any], targets: Collection[str], *, rank: int, alpha: float, adapter: str = "default"
) -> bytes:
    """An adapter as the service takes it, see docs/api.md.

    Args:
        weights: LoRA weights by their names in PEFT: `get_peft_model_state_dict`, or all parameters of PEFT's model;
            frozen parameters are ignored. Arrays, or tensors of torch in any dtype and on any device.
        targets: `lora_targets` of the model at the service.
        rank: rank of all weights.
        alpha: LoRA's α; the service adds alpha / rank · B · A to a weight. With rsLoRA, give √rank times it.
        adapter: name of the adapter, where `weights` have several.

    Raises:
        ValueError: a target has no weights, or other modules have; a weight has another rank, is not finite, or is
            there by two names; something is trained beside lora_A and lora_B.
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    names: dict[str, str] = {}
    of_model = any(name.endswith(".base_layer.weight") for name in weights)
    for name, weight in weights.items():
        parts = _NAME.fullmatch(name)
        if parts is None:
            _refuse_trained(name, weight, adapter, of_model)
        elif parts["adapter"] in (None, adapter):
            key = f"base_model.model.{parts['module']}.lora_{parts['side']}.weight"
            if key in names:
                raise ValueError(f"{names[key]} and {name} are weights of one layer; expected one of them")
            names[key], tensors[key] = name, _as_float32(name, weight)
    _check_names(tensors, targets)
    for name, values in tensors.items():
        if values.ndim != 2 or values.shape["lora_B" in name] != rank:
            expected = f"[out, {rank}]" if "lora_B" in name else f"[{rank}, in]"
            raise ValueError(
                f"{name} has shape {list(values.shape)}; expected {expected}: give the rank of the weights"
            )
    return _encoded(tensors, {"lora_alpha": repr(float(alpha)), "r": str(rank)})


def _refuse_trained(name: str, weight: Any, adapter: str, of_model: bool) -> None:
    """Refuse what is no lora_A or lora_B, unless it is frozen (which an adapter's own state never is) or another's."""
    further = _FURTHER.search(name)
    if further is None:
        trained = not of_model or getattr(weight, "requires_grad", False)
    else:
        trained = further["next"] in (None, "weight", "bias", adapter)
    if trained:
        raise ValueError(
            f"{name} is trained, but is no lora_A or lora_B, so the service would explore with another policy than "
            "yours; expected a plain LoRA: without DoRA, lora_bias, bias and modules_to_save"
        )


def _as_float32(name: str, weight: Any) -> NDArray[np.float32]:
    if hasattr(weight, "detach"):  # a tensor of torch; numpy has no bfloat16
        weight = weight.detach().cpu().float().numpy()
    values = np.ascontiguousarray(weight, dtype="<f4")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has values that are not finite; expected finite weights: resume from an earlier step")
    return values


def _check_names(tensors: Collection[str], targets: Collection[str]) -> None:
    expected = {f"base_model.model.{module}.lora_{side}.weight" for module in targets for side in "AB"}
    missing, extra = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
    if missing or extra:
        raise ValueError(
            f"{len(missing)} of the model's {len(expected)} LoRA weights are missing {missing[:3]}, "
            f"and {len(extra)} belong to none of its targets {extra[:3]}; expected LoRA on exactly the modules in "
            "lora_targets of GET /v1/models: give them as target_modules"
        )


def _encoded(tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file; equal contents give equal bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *(tensors[name].tobytes() for name in sorted(tensors))))
