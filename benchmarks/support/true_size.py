"""Models and a reward at true size with random weights, to measure time, which does not depend on the weights.

On a CPU they have the miniatures' sizes, to try the benchmarks out.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.load import locate
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import Meta, load_skeleton
from solrl_core.model_options import MODELS_OWN, ImageSize, size_text
from solrl_core.rewards.hpsv2 import HpsV2
from solrl_core.rewards.loading import dtype_named
from solrl_minis.catalog import WEIGHTS
from tests.support.tiny_skeletons import TINY as TINY_MODELS
from tests.support.tiny_skeletons import write_tiny
from tests.support.true_shapes import write_skeleton
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from support.own_process import Row, rows_of
from support.random_weights import materialize, randomize

Sizes = dict[str, Any]

MINIATURES = {"flux": "mini-flux", "sd3": "mini-sd3", "sd3-medium": "mini-sd3", "sana": "mini-sana"}
"""Model → miniature that provides the tokenizers; other models have tiny configurations."""
VIT_H: dict[str, Sizes] = {
    "vision": {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120},
    "text": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
TOKENS = {
    **{"flux": 128, "sd3": 205, "sana": 300, "sd3-medium": 205, "z-image": 64},
    **{"qwen-image": 256, "flux2-klein": 512, "wan": 512, "wan-81": 512, "wan-14b": 512},
}
"""Text tokens of the real models; the miniatures' tokenizers give fewer."""
TINY_CLIP = ImageSize(32, 32, 9)
TINY: dict[str, Sizes] = {
    part: {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    for part in VIT_H
}


def skeleton(model: str, folder: Path, device: str) -> PipelineBackbone:
    """Load a model without weights, from configurations written to `folder`; on a CPU its miniature."""
    miniature = stand_in(model, folder)
    if device != "cpu":
        return load_skeleton(str(write_skeleton(model, miniature, folder / model)))
    return load_skeleton(str(miniature), size=TINY_CLIP if model.startswith("wan") else MODELS_OWN)


def size_of(backbone: PipelineBackbone) -> int | str:
    """Width of square images in pixels; size of other samples, such as "832×480×33", which has frames."""
    return backbone.width if backbone.width == backbone.height and backbone.frames == 1 else size_text(backbone)


def random_backbone(model: str, device: str, guidance: float) -> Backbone:
    """A model of true size with random weights, whose prompts are encoded as random states; on a CPU its miniature."""
    if device == "cpu":
        return load_backbone(MINIATURES[model])
    with tempfile.TemporaryDirectory() as folder:
        bare = skeleton(model, Path(folder), device)
    with Meta():
        row = bare.encode(["a"], guidance)
    backbone = materialize(bare, device)
    encoded = random_text(row, model, torch.device(device))
    # The miniatures' tokenizers give fewer tokens than the real ones.
    backbone.encode = lambda *_: {name: value.clone() for name, value in encoded.items()}  # type: ignore[method-assign]
    return backbone


def random_text(text: Mapping[str, Tensor], model: str, device: torch.device) -> dict[str, Tensor]:
    """Random encodings of a prompt, like these of any device, and none of them masked.

    They have as many tokens as the real model's; on a CPU, as many as these.
    """

    def like(row: Tensor) -> Tensor:
        has_tokens = row.ndim == 3 or not row.is_floating_point()  # states and mask, but not pooled embeddings
        tokens = [TOKENS[model]] if has_tokens and device.type != "cpu" else row.shape[1:2]
        shape = (1, *tokens, *row.shape[2:])
        if not row.is_floating_point():
            return torch.ones(shape, dtype=row.dtype, device=device)
        return torch.randn(shape, dtype=row.dtype, device=device)

    return {name: like(row) for name, row in text.items()}


def stand_in(model: str, folder: Path) -> Path:
    """A model's miniature, or tiny configurations written to `folder`."""
    if model in TINY_MODELS:
        return write_tiny(model, folder / f"tiny-{model}")
    return Path(locate(MINIATURES[model]))


def written(folder: Path, device: str, model: str = "flux") -> tuple[Path, dict[str, Any]]:
    """Write a model and a reward of HPSv2's size as model folders (FLUX.1: 38 GB); existing ones are reused.

    A separate process writes them, so that the device memory it uses is free afterwards.

    Returns:
        The model's folder and the options of the reward `hpsv2`.
    """
    folder = folder / f"{'miniature' if device == 'cpu' else 'true'}-{model}"
    if not folder.is_dir():
        list(rows_of(write, folder, device, model, device=device))
    options = {"hpsv2": {"model": str(folder / "hps"), "processor": str(WEIGHTS / "mini-hpsv2")}}
    return folder / model, options


def write(folder: Path, device: str, name: str) -> Iterator[Row]:
    """Write both; yields no row."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = partial / name
    backbone = skeleton(name, partial, device)
    if device == "cpu":
        shutil.copytree(locate(MINIATURES[name]), model, ignore=shutil.ignore_patterns("*.safetensors"))
        own = json.loads((model / "solrl.json").read_text())
        (model / "solrl.json").write_text(json.dumps(own | {"rewards": {}}))
    with ThreadPoolExecutor() as pool:
        parts = {name: part for name, part in backbone.parts.items() if isinstance(part, nn.Module)}
        saved = [pool.submit(save, randomize(part, device), model / name) for name, part in parts.items()]
        for each in saved:
            each.result()
    save(randomize(clip_model(device), device), partial / "hps")
    partial.rename(folder)
    yield from ()


def save(module: Any, folder: Path) -> None:
    module.save_pretrained(folder)


class RandomHps(HpsV2):
    """HPSv2's arithmetic with random weights. The scores are meaningless; NaN becomes 0."""

    def __call__(self, *args: Any) -> Tensor:
        return super().__call__(*args).nan_to_num()


def clip_model(device: str) -> nn.Module:
    """Build HPSv2's CLIP ViT-H/14 on the meta device."""
    sizes = TINY if device == "cpu" else VIT_H
    vision = {**sizes["vision"], "image_size": 224, "patch_size": 14, "hidden_act": "gelu"}
    # With end-of-text token 2, transformers looks for the largest token id, as for the published model.
    text = {**sizes["text"], "vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 2}
    config = CLIPConfig(vision_config=vision, text_config=text, projection_dim=sizes["text"]["hidden_size"])
    with torch.device("meta"):
        return CLIPModel(config).eval()


def random_hps(device: str, dtype: str = "float32") -> RandomHps:
    """HPSv2 with random weights at the size of its CLIP ViT-H/14; a service on a GPU has them in bfloat16."""
    clip = randomize(clip_model(device), device).to(dtype_named(dtype))
    with patch("solrl_core.rewards.hpsv2.pretrained", return_value=clip):
        return RandomHps(model="random weights", processor=str(WEIGHTS / "mini-hpsv2"), device=device)
