"""`solrl-train export`: a checkpoint's averaged weights as LoRA for diffusers, with a model card, also on the hub."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from solrl_core.adapter import Adapter, encode_for_diffusers
from solrl_proto.text_files import read_text

from solrl_trainer.evaluation.ended import GRID, best_version
from solrl_trainer.report.model_card import CARD, LORA, MARK, held_out, model_card
from solrl_trainer.run_folder import checkpoints
from solrl_trainer.run_folder.output_files import write_file
from solrl_trainer.settings.config import RunConfig


def export(
    config: RunConfig,
    version: int | None = None,
    folder: Path | None = None,
    repository: str | None = None,
    *,
    layout: Literal["diffusers", "comfyui", "kohya"] = "diffusers",
    merged: bool = False,
) -> list[Path]:
    """Write lora.safetensors of a checkpoint's averaged weights and its model card, README.md.

    Args:
        version: of the checkpoint, by default the run's result, or else the newest.
        folder: folder of the files, by default the run's. Another also gets the grid of images, if there is one.
        repository: `USER/NAME` on the hub, where the card loads the weights; by default the folder.
        layout: also write lora-LAYOUT.safetensors, unless it is diffusers'.
        merged: also write the folder transformer, with the weights merged into the model's, in BF16.

    Returns:
        The files, lora.safetensors first; without the transformer's files.

    Raises:
        FileNotFoundError: there is no checkpoint yet.
        FileExistsError: the folder has a README.md that is no model card of a run, or, with merged, is a model's.
        ValueError: the checkpoint is damaged, or of other settings; or the layout has no names for the model.
        OSError: a file cannot be written, or the model to merge into cannot be loaded.
    """
    chosen = best_version(config.output) if version is None else version
    checkpoint = checkpoints.require(config.output / "checkpoints", chosen)
    folder = folder or config.output
    weights, card, grid = (folder / name for name in (LORA, CARD, GRID))
    if card.is_file() and MARK not in read_text(card):
        raise FileExistsError(f"{card} is no model card of solrl; choose another --output, or move it away")
    if merged and (index := folder / "model_index.json").exists():
        raise FileExistsError(
            f"got --merged into {folder}, which has {index.name}: the model there would lose its transformer; expected "
            "a folder without a model; choose another --output"
        )
    figures = held_out(config.output, checkpoint.version)
    text = model_card(config, checkpoint.version, figures, repository or str(folder))
    named = None if layout == "diffusers" else _in_layout(checkpoint.averaged, config, layout)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(weights, encode_for_diffusers(checkpoint.averaged))
    write_file(card, text)
    files = [weights, card]
    if named is not None:
        files.append(folder / f"lora-{layout}.safetensors")
        write_file(files[-1], named)
    if merged:
        _write_merged(checkpoint.averaged, config, folder / "transformer")
    if figures is not None and figures.grid is not None:
        if figures.grid.resolve() != grid.resolve():
            write_file(grid, figures.grid.read_bytes())
        files.append(grid)
    return files


def _in_layout(adapter: Adapter, config: RunConfig, layout: Literal["comfyui", "kohya"]) -> bytes:
    from solrl_core.families.load import describe_model
    from solrl_core.families.original_layers import encode_in_layout

    model = describe_model(config.model, config.revision)
    if model is None:
        raise ValueError(
            f"the layer names of {layout} depend on the model's family, and {config.model} is not on this machine; "
            "export where it is"
        )
    return encode_in_layout(adapter, model.family.family, layout)


def _write_merged(adapter: Adapter, config: RunConfig, folder: Path) -> None:
    import torch
    from solrl_core.lora import Merger, target_modules

    from solrl_trainer.records.waits import Waits
    from solrl_trainer.rollouts.loading import load_model

    backbone = load_model(config, "cpu", (), {}, Waits(), dtype=torch.bfloat16).backbone
    transformer: Any = backbone.transformer
    Merger(target_modules(transformer, backbone.lora_targets), transformer).merge(adapter)
    transformer.save_pretrained(folder)


def check_push(repository: str) -> None:
    """Check a push before the hub is asked; a ValueError if the name is not `USER/NAME`, or there is no token."""
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"got --push-to-hub {repository!r}; expected USER/NAME")
    if get_token() is None:
        raise ValueError(
            f"--push-to-hub {repository} needs a token of Hugging Face that may write: set HF_TOKEN, or log in with "
            "`hf auth login`"
        )


def push(files: Sequence[Path], repository: str, message: str) -> str:
    """Upload files as one commit to a model repository of the hub, created if there is none; returns its address.

    An OSError says why the hub refuses, or cannot be reached, and where the files are.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = HfApi()
    try:
        address = str(hub.create_repo(repository, exist_ok=True))
        added = [CommitOperationAdd(path.name, path) for path in files]
        hub.create_commit(repository, added, commit_message=message)
    except Exception as error:
        raise OSError(
            f"cannot push to {repository} at {hub.endpoint}: {error}; expected a token that may write there "
            "(HF_TOKEN), and a hub that can be reached (HF_ENDPOINT, HF_HUB_OFFLINE). The files are in "
            f"{files[0].parent}; the same command tries again"
        ) from error
    return address
