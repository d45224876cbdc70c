"""The weights that are shipped: small, in BF16, loadable, and described."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from solrl_core.families import load_backbone
from solrl_core.fingerprint import module_digest
from solrl_core.rewards import load_reward
from solrl_minis import catalog

MIB = 2**20
PIPELINE, CLIP = catalog.mini_sana(), catalog.WEIGHTS / "mini-clip"
FILES = sorted(catalog.WEIGHTS.rglob("*.safetensors"))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def test_they_are_small() -> None:
    assert size(PIPELINE) <= 8 * MIB
    assert size(CLIP) <= 2 * MIB
    assert size(catalog.WEIGHTS.parent) <= 28 * MIB


def test_nothing_but_safetensors_json_and_the_card_is_shipped() -> None:
    kinds = {path.suffix for path in catalog.WEIGHTS.rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".md", ".png", ".txt"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(catalog.WEIGHTS)))
def test_they_are_bfloat16_and_finite(path: Path) -> None:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_there_are_the_four_modules() -> None:
    folders = {str(path.parent.relative_to(catalog.WEIGHTS)) for path in FILES}
    assert folders == {"mini-clip", "mini-sana/text_encoder", "mini-sana/transformer", "mini-sana/vae"}


def test_the_pipeline_is_of_the_familys_classes() -> None:
    index = json.loads((PIPELINE / "model_index.json").read_text())
    assert index["_class_name"] == "SanaPipeline"
    assert {name: index[name][1] for name in ("vae", "transformer", "text_encoder", "scheduler")} == {
        "vae": "AutoencoderDC",
        "transformer": "SanaTransformer2DModel",
        "text_encoder": "Gemma2Model",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    }


def test_they_load_and_make_an_image_that_is_scored() -> None:
    backbone = load_backbone("mini-sana")
    assert (backbone.name, backbone.family, backbone.height, backbone.width) == ("mini-sana", "sana", 64, 64)
    image = backbone.decode(torch.zeros(1, *backbone.latent_shape))
    assert image.shape == (1, 3, 64, 64)
    assert torch.isfinite(load_reward("clipscore", backbone)(image, ["a red circle"], [{}])).all()
    # What the trainer and the service hold are the file's values, neither rounded nor cast anew.
    with safe_open(PIPELINE / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
        for name, tensor in backbone.transformer.state_dict().items():
            assert torch.equal(tensor, file.get_tensor(name).float())
    assert module_digest(backbone.transformer) == module_digest(load_backbone(str(PIPELINE)).transformer)


@pytest.mark.parametrize("folder", [PIPELINE, CLIP], ids=lambda path: path.name)
def test_there_is_a_model_card(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "apache-2.0" in card.lower()
    assert "solrl_minis.recipe" in card
    for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", card):
        assert (folder / image).is_file(), image
    if folder == PIPELINE:
        assert "strict" in card.lower()
        assert re.search(r"\d+(\.\d+)? ?%", card)
        assert len(re.findall(r"!\[", card)) >= 2, "the loss curves and the sample grid"
