"""A tiny model of each variant of each family, as this project and as diffusers loads it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.families.own_pipeline import by_own_pipeline
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.sampling.generator import Generator
from tests.core.families.tiny_pipelines import (
    write_flux,
    write_flux2_klein,
    write_qwen_image,
    write_sd3,
    write_wan,
    write_z_image,
)

MODELS: dict[str, Callable[[Path], Path]] = {
    "sana/mini": lambda folder: Path(locate("mini-sana")),
    **{"sd3/3": partial(write_sd3, sd35=False), "sd3/3.5": partial(write_sd3, sd35=True)},
    "sd3/dynamic": partial(write_sd3, sd35=False, dynamic=True),
    **{"flux/dev": partial(write_flux, dev=True), "flux/schnell": partial(write_flux, dev=False)},
    **{"z-image/static": write_z_image, "z-image/dynamic": partial(write_z_image, dynamic=True)},
    **{"qwen-image/base": write_qwen_image, "flux2-klein/base": write_flux2_klein, "wan/2.1": write_wan},
    "flux2-klein/distilled": partial(write_flux2_klein, distilled=True),
}
"""Family and variant → writer of its folder; SANA's is the shipped one. A `dynamic` schedule depends on the size."""
ONE_EACH = ["sana/mini", "sd3/3.5", "flux/dev", "z-image/static", "qwen-image/base", "flux2-klein/base", "wan/2.1"]
"""The variants of which tests of every family take one."""


def variants(family: str) -> pytest.MarkDecorator:
    """Run a test with each variant of one family as its `tiny`."""
    return pytest.mark.parametrize("tiny", [name for name in MODELS if name.split("/")[0] == family], indirect=True)


@dataclass(frozen=True)
class Tiny:
    """One folder, loaded twice; tests must not modify its models.

    Attributes:
        name: family and variant.
        folder: where it is.
        backbone: as this project loads it.
        pipeline: as diffusers does, in float32.
        generator: BF16, of the backbone.
    """

    name: str
    folder: Path
    backbone: PipelineBackbone
    pipeline: Any
    generator: Generator


def load_both(name: str, models: Path) -> Tiny:
    """Write a model into the folder `models`; load it as a backbone and as a diffusers pipeline."""
    folder = MODELS[name](models / name)
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    backbone = load_backbone(str(folder))
    return Tiny(name, folder, backbone, pipeline, Generator(backbone, "bf16"))


def sized(tiny: Tiny, height: int, width: int) -> Tiny:
    """The same model at another default size."""
    backbone = copy.copy(tiny.backbone)
    backbone.height, backbone.width = height, width
    return Tiny(tiny.name, tiny.folder, backbone, tiny.pipeline, Generator(backbone, "bf16"))


def by_diffusers(
    tiny: Tiny, prompts: list[str], seeds: list[int], steps: int, guidance: float = 1.0, output_type: str = "pt"
) -> torch.Tensor:
    """Images, or latents as the pipeline has them, by its own loop and schedule."""
    return by_own_pipeline(tiny.backbone, prompts, seeds, steps, guidance, output_type, tiny.pipeline)


def named_layers(model: torch.nn.Module, ends: Sequence[str]) -> set[str]:
    """Linear layers whose dotted names have these ends, as PEFT reads a list of targets."""
    found = tuple(f".{end}" for end in ends)
    return {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name.endswith(found)}
