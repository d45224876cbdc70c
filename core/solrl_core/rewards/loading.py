"""Loaders for rewards: models and tokenizers through transformers, checkpoint files without running pickled code."""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
"""Files in every folder of a model, and of a tokenizer."""


class RewardFile(NamedTuple):
    """A file that a reward loads, of a folder or hub repository `where`, or the local file `where` itself.

    `CONFIG` stands for a model with its weights, `TOKENIZER` for a tokenizer. `option` takes the place of a copy.
    """

    where: str
    file: str = ""
    option: str = "model"

    @property
    def download(self) -> str:
        """Command that downloads what is loaded."""
        files = {CONFIG: "", TOKENIZER: " --include '*.json' --include '*.txt'"}.get(self.file, f" {self.file}")
        return f"hf download {self.where}{files}"

    def fetched(self) -> str:
        """Path of the file, downloaded if it is on the hub and not on this machine.

        Raises:
            OSError: the hub cannot be reached or lacks the file; names the option that takes a local path.
        """
        from huggingface_hub import hf_hub_download

        if not self.file:
            return self.where
        try:
            return str(hf_hub_download(self.where, self.file))
        except Exception as error:
            raise OSError(
                f"cannot get {self.file} of {self.where} from the hub ({error}); download it and pass its path as "
                f"`{self.option}`"
            ) from error


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """Torch dtype with the given name.

    Raises:
        ValueError: the name is not in `DTYPES`.
    """
    if name not in DTYPES:
        raise ValueError(f"got dtype {name!r}; expected one of {sorted(DTYPES)}")
    return DTYPES[name]


def published_or(location: str | None, repository: str, name: str, option: str = "checkpoint") -> RewardFile:
    """The local file that an option gives, or the published one."""
    return RewardFile(location or repository, "" if location else name, option)


def require_one(model: str | None, checkpoint: str | None) -> None:
    """Raise ValueError if both places of the same weights are given."""
    if model and checkpoint:
        raise ValueError(f"got model {model!r} and checkpoint {checkpoint!r}; expected one of them")


def tokenizer_file(model: str | None, processor: str | None, default: str) -> RewardFile:
    """The tokenizer of `processor`, else of `model` if it is a folder, else of `default`."""
    where = processor or (model if model and Path(model).is_dir() else default)
    return RewardFile(where, TOKENIZER, "processor")


def batches(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows that cover `count` rows.

    Raises:
        ValueError: `size` is below one.
    """
    if size < 1:
        raise ValueError(f"got batch_size {size}; expected at least 1")
    return (slice(start, start + size) for start in range(0, count, size))


def pretrained(kind: Any, where: str, dtype: torch.dtype) -> Any:
    """Load a transformers model from a folder or hub id, for inference.

    Raises:
        OSError: no such folder, or the hub cannot be reached.
        ValueError: weights are missing or of the wrong shape; transformers would initialise them at random.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
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
    """Load the fast tokenizer of a folder or hub id.

    Raises:
        OSError: there is none.
    """
    from transformers import AutoTokenizer

    tokenizer = processing_at(AutoTokenizer, where, "a tokenizer")
    # Every call sets these. A saved tokenizer keeps the ones of its last call, which must not be part of the digest.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def processing_at(kind: Any, where: str, what: str, **options: Any) -> Any:
    """Load a tokenizer or an image processor of a folder or hub id by its class of transformers.

    Image processors use PIL, whether or not torchvision is installed. `what` names it in the error.

    Raises:
        OSError: there is none.
    """
    try:
        return kind.from_pretrained(where, **options)
    except (OSError, ValueError) as error:
        raise OSError(
            f"cannot read {what} from {where!r} ({error}); expected a folder written by save_pretrained or a hub id "
            "that this machine can reach: pass one as option `processor`"
        ) from error


def read_checkpoint(path: str) -> dict[str, torch.Tensor]:
    """Read tensors by name from a .safetensors or torch file, without running pickled code.

    A torch file has them at the top level, or under "state_dict" or "model".

    Raises:
        OSError: no such file.
        ValueError: the file is not such a checkpoint.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"got checkpoint {path!r}, which is not a file; expected a .pt or .safetensors file")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except OSError:
        raise
    except Exception as error:  # torch and safetensors raise many kinds of errors for invalid files
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path!r} is not a checkpoint of plain tensors: {why}") from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(
            f"{path!r} contains {type(content).__name__}; expected tensors by name, at the top level or under "
            "'state_dict' or 'model'"
        )
    return dict(content)


def listed(names: Any, limit: int = 5) -> str:
    """The first `limit` of some names in alphabetical order, and the number of remaining ones."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
