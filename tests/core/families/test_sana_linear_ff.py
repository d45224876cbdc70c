"""SANA checkpoints with the feed-forward as linear layers load like those with 1×1 convolutions."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.load import locate
from solrl_core.fingerprint import part_digests
from solrl_core.sampling.generator import Generator

NAME = "diffusion_pytorch_model"


def rewritten(folder: Path, shards: int, linear: bool = True, drop: str = "none") -> Path:
    """The shipped SANA in `folder`, its transformer's weights in `shards` files, without the tensor `drop`."""
    shutil.copytree(locate("mini-sana"), folder)
    transformer = folder / "transformer"
    weights = load_file(transformer / f"{NAME}.safetensors")
    (transformer / f"{NAME}.safetensors").unlink()
    changed = [key for key in weights if key.endswith((".ff.conv_inverted.weight", ".ff.conv_point.weight"))]
    assert changed
    for key in changed if linear else []:
        weights[key] = weights[key].flatten(1)
    weights.pop(drop, None)
    if shards == 1:
        save_file(weights, transformer / f"{NAME}.safetensors")
        return folder
    files = {key: f"{NAME}-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, key in enumerate(sorted(weights))}
    for file in set(files.values()):
        save_file({key: weights[key] for key in weights if files[key] == file}, transformer / file)
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (transformer / f"{NAME}.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(("shards", "linear"), [(1, True), (3, True), (3, False)])
def test_the_layout_of_the_file_does_not_matter(backbone: Backbone, tmp_path: Path, shards: int, linear: bool) -> None:
    loaded = load_backbone(str(rewritten(tmp_path / "sana", shards, linear)))
    ours, theirs = loaded.transformer.state_dict(), backbone.transformer.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, theirs[key]), key
    assert part_digests(loaded.parts) == part_digests(backbone.parts)
    assert not loaded.transformer.training
    assert not any(p.requires_grad for p in loaded.transformer.parameters())
    images = [Generator(b, "nvfp4").generate("a red circle", [3], steps=2).images for b in (loaded, backbone)]
    assert torch.equal(*images)


def test_a_dtype_is_kept(tmp_path: Path) -> None:
    loaded = load_backbone(str(rewritten(tmp_path / "sana", 1)), dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.transformer.parameters()} == {torch.bfloat16}


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    lacking = "transformer_blocks.0.attn1.to_q.weight"
    with pytest.raises(OSError, match=lacking):
        load_backbone(str(rewritten(tmp_path / "sana", 2, drop=lacking)))
