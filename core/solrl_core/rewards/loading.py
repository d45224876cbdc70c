"""Reading what rewards need: models and tokenizers through transformers, checkpoint files without running code."""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """The dtype behind an option.

    Raises:
        ValueError: not one of `DTYPES`.
    """
    if name not in DTYPES:
        raise ValueError(f"got dtype {name!r}; expected one of {sorted(DTYPES)}")
    return DTYPES[name]


def batches(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `count` rows.

    Raises:
        ValueError: `size` is below one.
    """
    if size < 1:
        raise ValueError(f"got batch_size {size}; expected at least 1")
    return (slice(start, start + size) for start in range(0, count, size))


def pretrained(kind: Any, where: str, dtype: torch.dtype) -> Any:
    """A transformers model from a folder or hub id, for inference.

    Raises:
        OSError: no such folder, or the hub does not answer.
        ValueError: weights are missing or have other shapes, which transformers would fill at random.
    """
    try:
        model, info = kind.from_pretrained(where, dtype=dtype, output_loading_info=True)
    except RuntimeError as error:
        raise ValueError(f"{where!r} does not fit its own config.json as {kind.__name__}: {error}") from error
    if info["missing_keys"]:
        raise ValueError(
            f"{where!r} lacks weights of {kind.__name__}: {listed(info['missing_keys'])}; expected a folder written by "
            "save_pretrained of that class"
        )
    return model.eval().requires_grad_(False)


def tokenizer_at(where: str) -> Any:
    """The fast tokenizer of a folder or hub id.

    Raises:
        OSError: there is none.
    """
    from transformers import AutoTokenizer

    tokenizer = _processing(AutoTokenizer, where, "a tokenizer")
    # Each call sets these again; what the last call before saving left must not be part of the digest.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def image_processor_at(where: str) -> Any:
    """The CLIP image processor of a folder or hub id, in PIL whether or not torchvision is installed.

    Raises:
        OSError: there is none.
    """
    from transformers import CLIPImageProcessorPil

    return _processing(CLIPImageProcessorPil, where, "an image processor")


def _processing(kind: Any, where: str, what: str) -> Any:
    try:
        return kind.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise OSError(
            f"cannot read {what} from {where!r} ({error}); expected a folder that save_pretrained wrote or a hub id "
            "that this machine can reach: name one with the option `processor`"
        ) from error


def hub_file(repository: str, name: str, option: str) -> str:
    """Path of a hub file, downloaded if need be.

    Raises:
        OSError: the hub does not answer or does not have it; names the option that takes a local path.
    """
    from huggingface_hub import hf_hub_download

    try:
        return str(hf_hub_download(repository, name))
    except Exception as error:
        raise OSError(
            f"cannot get {name} of {repository} from the hub ({error}); download it and pass its path as `{option}`"
        ) from error


def read_checkpoint(path: str) -> dict[str, torch.Tensor]:
    """Tensors by name of a .safetensors or torch file, bare or under "state_dict" or "model"; no pickled code is run.

    Raises:
        OSError: no such file.
        ValueError: it is something else.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"got checkpoint {path!r}, which is no file; expected a .pt or .safetensors file")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except OSError:
        raise
    except Exception as error:  # torch and safetensors have errors of many kinds for files that are something else
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path!r} is not a checkpoint of plain tensors: {why}") from error
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise ValueError(
            f"{path!r} holds {type(found).__name__}; expected tensors by name, alone or under 'state_dict' or 'model'"
        )
    return dict(found)


def listed(names: Any, most: int = 5) -> str:
    """The first few of some names, and how many more."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
