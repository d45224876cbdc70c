"""Images, models and a call counter for the tests of rewards."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from solrl_core.families.load import locate
from torch import nn

CLIP = str(Path(locate("mini-sana")).parent / "mini-clip")
DATA = Path(__file__).parent / "data"


def _stored(name: str, **options: Any) -> dict[str, Any]:
    return {"checkpoint": str(DATA / name / "checkpoint.pt"), "processor": str(DATA / name / "tokenizer"), **options}


HPSV2 = _stored("hpsv2", vision_heads=2, text_heads=2)
IMAGEREWARD = _stored("imagereward", vision_heads=2)
HPSV3 = _stored("hpsv3", dtype="float32")
AESTHETIC: dict[str, Any] = {"model": str(DATA / "aesthetic/clip"), "checkpoint": str(DATA / "aesthetic/head.pth")}
PROMPTS = [
    "a red circle",
    "two blue squares",
    "a green cross above a yellow triangle",
    "a picture of a very long winded and winding prompt that says far more than twenty four tokens can ever hold " * 2,
]
ODD_SIZES = [(64, 96), (104, 64), (97, 65), (48, 80), (32, 32), (256, 255), (64, 67), (71, 64)]
Tensors = dict[str, torch.Tensor]


def rewritten(folder: Path, options: dict[str, Any], change: Callable[[Tensors], Any]) -> dict[str, Any]:
    """Options that name a copy of the checkpoint with something changed."""
    found = torch.load(options["checkpoint"], weights_only=True)
    change(found.get("state_dict", found))
    torch.save(found, folder / "checkpoint.pt")
    med = Path(options["checkpoint"]).parent / "med_config.json"
    if med.is_file():
        shutil.copy(med, folder)
    return {**options, "checkpoint": str(folder / "checkpoint.pt")}


def on_bytes(count: int, height: int, width: int) -> torch.Tensor:
    """Random images whose values are whole numbers of 255."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, height // 8, width // 8, generator=generator)
    images = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    return (images * 255).round() / 255


def reference_pairs() -> tuple[np.lib.npyio.NpzFile, list[torch.Tensor], list[str]]:
    """The packages' scores by name, images [3, H, W] in [0, 1] and prompts of `scripts/reward-parity`."""
    arrays = np.load(DATA / "reference.npz")
    images = [arrays[name] for name in arrays.files if name.startswith("image_")]
    return (
        arrays,
        [torch.from_numpy(image).permute(2, 0, 1).float() / 255 for image in images],
        [str(prompt) for prompt in arrays["prompts"]],
    )


@contextmanager
def rows_through(module: nn.Module) -> Iterator[list[int]]:
    """Batch sizes of the calls of a module while this is open."""
    rows: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows.append(len((*args, *kwargs.values())[0]))

    handle = module.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()
