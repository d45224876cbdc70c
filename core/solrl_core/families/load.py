"""Loads a model by name, folder or hub id, through diffusers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache
from packaging.version import Version
from solrl_proto.model_names import CHECKPOINT, split_checkpoint
from solrl_proto.text_files import read_json

from solrl_core.families.part_files import ModelFileError, components, missing_files, part_class, read_index, variant_of
from solrl_core.families.pipeline import PipelineBackbone, is_text_encoder
from solrl_core.families.single_file import parts_by_content, parts_in, parts_of_file
from solrl_core.model_options import MODELS_OWN, ImageSize, ModelOptions, read_options
from solrl_core.registry import FolderRegistry, Registry

FAMILIES: Registry[type[PipelineBackbone]] = Registry(
    "family",
    "solrl.families",
    {
        "Flux2KleinPipeline": "solrl_core.families.flux2_klein:Flux2Klein",
        "FluxPipeline": "solrl_core.families.flux:Flux",
        "QwenImagePipeline": "solrl_core.families.qwen_image:QwenImage",
        "SanaPipeline": "solrl_core.families.sana:Sana",
        "StableDiffusion3Pipeline": "solrl_core.families.sd3:StableDiffusion3",
        "WanPipeline": "solrl_core.families.wan:Wan",
        "ZImagePipeline": "solrl_core.families.z_image:ZImage",
    },
    wrong=lambda target: (
        None
        if isinstance(target, type) and issubclass(target, PipelineBackbone)
        else "a subclass of solrl_core.families.pipeline.PipelineBackbone"
    ),
    # Nothing else: a downloaded model must not choose what is imported.
    others=("a class that a package registers as an entry point of solrl.families",),
)
"""Families by the pipeline class that a model_index.json names."""

MODELS = FolderRegistry(
    "model",
    "solrl.models",
    others=(
        "package.module:attribute",
        "a folder with a model_index.json",
        "a hub id such as Efficient-Large-Model/Sana_1600M_1024px_diffusers",
        "FILE.safetensors+FOLDER, a checkpoint and the folder or hub id of everything else",
    ),
)

# The first row that matches one of the causes of a failure applies. Order matters: GatedRepoError is a
# RepositoryNotFoundError.
_ADVICE: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    (
        (errors.GatedRepoError,),
        "access was not granted: accept the terms at https://huggingface.co/{where}, and set HF_TOKEN to a token of "
        "that account",
    ),
    (
        (errors.RepositoryNotFoundError,),
        "the hub has no such model, or it is private: check the id, or set HF_TOKEN to a token that may read it",
    ),
    ((errors.RevisionNotFoundError,), "the model has no such revision on the hub: give one of its commits or tags"),
    (
        (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError),
        "the hub cannot be reached and the model is not in the local cache: check the network and HF_HUB_OFFLINE, "
        "or run `hf download {where}` on a machine with network access (with HF_TOKEN, if the model is gated) and give "
        "the folder",
    ),
)
_OTHER_FILES = (".ckpt", ".gguf", ".pt", ".pth")

_ADVICE_ELSE = (
    "expected a folder in diffusers format (model_index.json, one folder per part, weights as safetensors), "
    "or a hub id that this machine can reach; for gated models set HF_TOKEN to a token whose account was granted access"
)


def locate(model: str) -> str:
    """Resolve a model to its folder or hub id; a checkpoint, to the folder or hub id of the rest of its model.

    Raises:
        ValueError: not a registered name, not a folder, and not shaped like a hub id; or a file that does not exist.
    """
    file, base = split_model(model)
    if file is not None and not file.is_file():
        raise ValueError(f"there is no file {file}; expected a single-file checkpoint")
    return MODELS.locate(
        base, lambda name: Path(name).is_dir() or (name.count("/") == 1 and not name.startswith((".", "/")))
    )


def split_model(model: str) -> tuple[Path | None, str]:
    """The single-file checkpoint of a model, None in diffusers format; and the name, folder or hub id of the rest.

    Raises:
        ValueError: it is not a safetensors file, or the name lacks the place of the rest.
    """
    file, base = split_checkpoint(model)
    if file is not None or not base.endswith((CHECKPOINT, *_OTHER_FILES)) or Path(base).is_dir():
        return (None if file is None else Path(file)), base
    if not base.endswith(CHECKPOINT):
        raise ValueError(f"got the file {base}; expected a checkpoint as safetensors: convert it")
    if (Path(base).parent / "model_index.json").is_file():
        return Path(base), str(Path(base).parent)
    raise ValueError(
        f"got the checkpoint {base} alone; expected {base}+FOLDER, where FOLDER is the model's folder in diffusers "
        "format or its hub id, from which text encoders, tokenizers, autoencoder and configurations come"
    )


def family_of(pipeline: object, where: str) -> type[PipelineBackbone]:
    """The family of a pipeline class that the model in `where` names.

    Raises:
        ValueError: there is none.
    """
    try:
        return FAMILIES.find(str(pipeline))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def pipeline_call(model: str, guidance: float) -> dict[str, Any] | None:
    """Arguments that make the model's diffusers pipeline generate as here, in addition to prompt and steps.

    Nothing is downloaded: None if the model's files are not on this machine.

    Raises:
        ValueError: unknown model or family.
    """
    if (description := describe_model(model)) is None:
        return None
    return description.family.pipeline_call(description.options, description.config, guidance)


@dataclass(frozen=True)
class ModelDescription:
    """The family of a model, its own settings, and its transformer's configuration."""

    family: type[PipelineBackbone]
    options: ModelOptions
    config: Mapping[str, Any]


def describe_model(model: str, revision: str | None = None) -> ModelDescription | None:
    """The description of a model. Nothing is downloaded: None if its files are not on this machine.

    Raises:
        ValueError: unknown model or family.
    """
    where = locate(model)

    def on_this_machine(name: str) -> Path | None:
        file: object = Path(where) / name
        if not Path(where).is_dir():
            file = try_to_load_from_cache(where, name, revision=revision)
        return Path(file) if isinstance(file, str | Path) and Path(file).is_file() else None

    index, config = on_this_machine("model_index.json"), on_this_machine("transformer/config.json")
    if index is None or config is None:
        return None
    family = family_of(read_index(index.parent).get("_class_name"), where)
    return ModelDescription(family, read_options(str(index.parent)), read_json(config))


def advice(error: BaseException, where: str) -> str:
    """Advice on a failure to load the model `where`, by its first cause that is known."""
    matches = (words for kinds, words in _ADVICE if any(isinstance(cause, kinds) for cause in _causes(error)))
    return next(matches, _ADVICE_ELSE).format(where=where)


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    return causes


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn any failure within the block into an OSError with advice."""
    try:
        yield
    except ModelFileError as error:
        raise OSError(f"cannot load {where!r}: {error}") from error
    except Exception as error:
        raise OSError(f"cannot load {where!r}: {advice(error, where)}; original error: {error}") from error


def model_folder(model: str, *, revision: str | None = None, external: Collection[str] = ()) -> Path:
    """The local folder of a model with all of its files, which are downloaded if it is on the hub.

    The weights of `external` parts come from elsewhere.

    Raises:
        ValueError: unknown model.
        OSError: files are missing, the hub cannot be reached, or access was not granted.
    """
    where = locate(model)
    local = Path(where).is_dir()
    folder = Path(where) if local else _snapshot(where, revision, external)
    with explained(where):
        lacking = missing_files(folder, external)
    if lacking:
        remedy = "copy them there" if local else f"with network access, run `{_download(where, lacking, revision)}`"
        raise OSError(f"cannot load {where!r}: {folder} lacks {', '.join(lacking)}; {remedy}")
    return folder


def _download(where: str, files: Sequence[str], revision: str | None) -> str:
    """The command that fetches files of a hub model into the local cache."""
    names = () if any(name.endswith("/") for name in files) else files
    return " ".join(("hf download", where, *(("--revision", revision) if revision else ()), *names))


def _snapshot(where: str, revision: str | None, external: Collection[str]) -> Path:
    """The snapshot of a hub model in the local cache, downloaded if the hub can be reached."""
    from diffusers import DiffusionPipeline

    try:
        with explained(where):
            folder = Path(DiffusionPipeline.download(where, revision=revision, **dict.fromkeys(external)))
            for part in external:
                hf_hub_download(where, f"{part}/config.json", revision=revision)
            return folder
    except OSError as error:
        refusals = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
        refused = any(isinstance(cause, refusals) for cause in _causes(error))
        index = try_to_load_from_cache(where, "model_index.json", revision=revision)
        if refused or not isinstance(index, str) or not missing_files(Path(index).parent, external):
            raise
        return Path(index).parent


def dtype_argument(version: str) -> str:
    """Name of `from_pretrained`'s argument for the weights' dtype: a version ignores unknown names."""
    return "dtype" if Version(version) >= Version("0.40") else "torch_dtype"


def load_backbone(
    model: str,
    *,
    device: str = "cpu",
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    waiting: bool = False,
    transformer: torch.nn.Module | None = None,
    size: ImageSize = MODELS_OWN,
) -> PipelineBackbone:
    """Load a model's pipeline and wrap it in its family.

    By default, weights and arithmetic are bfloat16 on CUDA. On a CPU the weights are the same bfloat16 values stored
    in float32, because few processors multiply bfloat16 fast.

    Args:
        model: registered name, local folder in diffusers format, hub id, or FILE.safetensors+ one of these.
        device: "cpu", "cuda", "cuda:1", …
        revision: hub commit or tag.
        dtype: dtype of all weights, without rounding to bfloat16; None for the default above.
        waiting: leave transformer and text encoders in host memory, for a caller that decides what the device holds.
        transformer: used as it is, on whichever device it is, instead of loading the model's own.
        size: size of images.

    Raises:
        ValueError: unknown model or family, or a size that the model does not make.
        OSError: files are missing, the hub cannot be reached, or access was not granted.
    """
    import diffusers
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    where = locate(model)
    weight_dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    with explained(where):
        config = DiffusionPipeline.load_config(where, revision=revision)
    family = family_of(config.get("_class_name"), where)
    file, _ = split_model(model)
    in_file = () if file is None else parts_in(file, family.file_encoders)
    folder = model_folder(where, revision=revision, external=in_file)
    with explained(where):
        config = read_index(folder)
        for kind in components(config).values():
            part_class(*kind)
    parts: dict[str, torch.nn.Module] = {} if transformer is None else {"transformer": transformer}
    if file is not None:
        parts |= parts_of_file(file, folder, config, family.file_encoders, weight_dtype)
    parts |= parts_by_content(folder, config, parts, weight_dtype)
    options = {dtype_argument(diffusers.__version__): weight_dtype, "variant": variant_of(folder, config, parts)}
    with explained(where):
        pipeline = DiffusionPipeline.from_pretrained(folder, **options, **parts)
    if device.startswith("cuda"):
        # Triton launches kernels on the thread's current device, whichever device the tensors are on.
        torch.cuda.set_device(torch.device(device).index or 0)
    for part_name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module) and part is not transformer:
            if not (waiting and (part_name == "transformer" or is_text_encoder(part_name))):
                part.to(device)
            part.eval().requires_grad_(False)
            if dtype is None and weight_dtype is torch.float32:
                for tensor in part.state_dict().values():
                    if tensor.is_floating_point():
                        tensor.copy_(tensor.bfloat16())
    name = file.stem.lower() if file else model if where != model else Path(model).name.lower()
    backbone = family(pipeline, name, read_options(str(folder)).sized(size))
    backbone.device = next(pipeline.vae.parameters()).device
    return backbone
