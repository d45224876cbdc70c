"""SANA checkpoints with the authors' names: the loaded transformer equals an independent forward pass."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.load import locate
from solrl_core.fingerprint import part_digests
from solrl_core.sampling.generator import Generator
from tiny_pipelines import difference

WIDTH, HIDDEN, HEADS, CROSS_HEADS, CHANNELS, CAPTION = 64, 160, 2, 4, 8, 96

CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "num_attention_heads": HEADS,
    "attention_head_dim": WIDTH // HEADS,
    "num_cross_attention_heads": CROSS_HEADS,
    "cross_attention_head_dim": WIDTH // CROSS_HEADS,
    "cross_attention_dim": WIDTH,
    "mlp_ratio": 2.5,
    "patch_size": 1,
    "interpolation_scale": None,
}

SHAPES: dict[str, tuple[int, ...]] = {
    "x_embedder.proj": (WIDTH, CHANNELS, 1, 1),
    "t_embedder.mlp.0": (WIDTH, 256),
    "t_embedder.mlp.2": (WIDTH, WIDTH),
    "t_block.1": (6 * WIDTH, WIDTH),
    "y_embedder.y_proj.fc1": (WIDTH, CAPTION),
    "y_embedder.y_proj.fc2": (WIDTH, WIDTH),
    "final_layer.linear": (CHANNELS, WIDTH),
}

IN_A_BLOCK: dict[str, tuple[int, ...]] = {
    "attn.qkv": (3 * WIDTH, WIDTH),
    "attn.proj": (WIDTH, WIDTH),
    "cross_attn.q_linear": (WIDTH, WIDTH),
    "cross_attn.kv_linear": (2 * WIDTH, WIDTH),
    "cross_attn.proj": (WIDTH, WIDTH),
    "mlp.inverted_conv.linear": (2 * HIDDEN, WIDTH),
    "mlp.depth_conv.conv": (2 * HIDDEN, 1, 3, 3),
    "mlp.point_conv.linear": (WIDTH, HIDDEN),
}

WITHOUT_BIAS = ("attn.qkv", "mlp.point_conv.linear")

Weights = dict[str, torch.Tensor]


def native() -> Weights:
    """Random weights of every name that SANA_LinearFFN.pth has, of two small blocks."""
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES | {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in IN_A_BLOCK.items()}
    every = {f"{name}.weight": shape for name, shape in shapes.items()}
    every |= {f"{name}.bias": shape[:1] for name, shape in shapes.items() if not name.endswith(WITHOUT_BIAS)}
    every |= {f"blocks.{i}.scale_shift_table": (6, WIDTH) for i in range(2)}
    every |= {"final_layer.scale_shift_table": (2, WIDTH), "attention_y_norm.weight": (WIDTH,)}
    every |= {"pos_embed": (1, 64, WIDTH), "y_embedder.y_embedding": (300, CAPTION)}
    return {
        name: torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:])) for name, shape in every.items()
    }


def forward(weights: Weights, latents: torch.Tensor, text: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Velocity [B, C, H, W] by what the authors' names mean (arXiv 2410.10629); every token of the text counts."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), eps=1e-6)

    side = latents.shape[-1]
    x = F.conv2d(latents, weights["x_embedder.proj.weight"], weights["x_embedder.proj.bias"]).flatten(2).mT
    angles = at[:, None] * torch.exp(-math.log(10_000) * torch.arange(128) / 128)
    t = linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], 1))
    t = linear("t_embedder.mlp.2", F.silu(t))
    modulation = linear("t_block.1", F.silu(t)).unflatten(1, (6, WIDTH))
    y = linear("y_embedder.y_proj.fc2", F.gelu(linear("y_embedder.y_proj.fc1", text), approximate="tanh"))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * weights["attention_y_norm.weight"]
    for i in range(2):
        block = f"blocks.{i}"
        table = (weights[f"{block}.scale_shift_table"] + modulation)[:, :, None].unbind(1)
        q, k, v = linear(f"{block}.attn.qkv", norm(x) * (1 + table[1]) + table[0]).chunk(3, -1)
        q, k, v = (heads(part, HEADS) for part in (F.relu(q), F.relu(k), v))
        weighed = q @ (k.mT @ v) / (q @ k.sum(2)[..., None] + 1e-15)
        x = x + table[2] * linear(f"{block}.attn.proj", weighed.transpose(1, 2).flatten(2))
        k, v = (heads(part, CROSS_HEADS) for part in linear(f"{block}.cross_attn.kv_linear", y).chunk(2, -1))
        seen = F.scaled_dot_product_attention(heads(linear(f"{block}.cross_attn.q_linear", x), CROSS_HEADS), k, v)
        x = x + linear(f"{block}.cross_attn.proj", seen.transpose(1, 2).flatten(2))
        wide = F.silu(linear(f"{block}.mlp.inverted_conv.linear", norm(x) * (1 + table[4]) + table[3]))
        kernel = f"{block}.mlp.depth_conv.conv"
        wide = wide.mT.unflatten(-1, (side, side))
        wide = F.conv2d(wide, weights[f"{kernel}.weight"], weights[f"{kernel}.bias"], padding=1, groups=2 * HIDDEN)
        value, gate = wide.flatten(2).mT.chunk(2, -1)
        x = x + table[5] * linear(f"{block}.mlp.point_conv.linear", value * F.silu(gate))
    shift, scale = (weights["final_layer.scale_shift_table"] + t[:, None])[:, :, None].unbind(1)
    return linear("final_layer.linear", norm(x) * (1 + scale) + shift).mT.unflatten(-1, (side, side))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A SANA in diffusers' format without its transformer's weights."""
    copied = Path(shutil.copytree(locate("mini-sana"), tmp_path / "sana"))
    transformer = copied / "transformer"
    (transformer / "diffusion_pytorch_model.safetensors").unlink()
    config = json.loads((transformer / "config.json").read_text()) | CONFIG
    (transformer / "config.json").write_text(json.dumps(config))
    return copied


def put(folder: Path, weights: Weights, kind: str) -> None:
    if kind == "as diffusers names a file":
        save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    elif kind == "safetensors":
        save_file(weights, folder / "transformer" / "SANA_LinearFFN.safetensors")
    else:
        torch.save({kind: weights} if kind else weights, folder / "transformer" / "SANA_LinearFFN.pth")


@pytest.mark.parametrize("kind", ["state_dict", "model", "", "safetensors", "as diffusers names a file"])
@pytest.mark.parametrize("convolutions", [False, True])
def test_the_loaded_transformer_equals_the_authors_forward_pass(folder: Path, kind: str, convolutions: bool) -> None:
    weights = native()
    saved = dict(weights)
    for name in weights if convolutions else ():
        if "_conv.linear." in name:
            kernel = saved.pop(name)
            whole = kernel[..., None, None] if kernel.ndim == 2 else kernel
            saved[name.replace("_conv.linear.", "_conv.conv.")] = whole
    put(folder, saved, kind)
    backbone = load_backbone(str(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, *backbone.latent_shape, generator=generator)
    text, sigma = torch.randn(2, 5, CAPTION, generator=generator), torch.tensor([0.9, 0.2])
    rows = {"states": text, "mask": torch.ones(2, 5)}
    with torch.no_grad():
        ours = backbone.velocity(backbone.transformer, latents, sigma, rows)
    theirs = forward(weights, latents, text, sigma * 1000)
    assert float(theirs.std()) > 0.1
    assert difference(ours, theirs) <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logvar_linear.weight": torch.zeros(1, WIDTH)}, r"unexpected: logvar_linear\.weight"),
        ({"blocks.1.attn.qkv.weight": None}, r"missing: blocks\.1\.attn\.qkv\.weight"),
        ({"blocks.0.mlp.point_conv.linear.weight": None}, r"missing: blocks\.0\.mlp\.point_conv\.linear\.weight"),
        ({"blocks.0.attn.qkv.weight": torch.zeros(WIDTH, WIDTH)}, r"qkv\.weight \[64, 64\] \(expected \[192, 64\]\)"),
        ({"blocks.2.attn.proj.bias": torch.zeros(WIDTH)}, r"unexpected: blocks\.2\.attn\.proj\.bias"),
    ],
)
def test_other_tensors_are_refused_by_name(folder: Path, change: dict[str, torch.Tensor | None], said: str) -> None:
    put(folder, {name: value for name, value in (native() | change).items() if value is not None}, "state_dict")
    with pytest.raises(OSError, match=rf"SANA_LinearFFN\.pth contains .*{said}.*expected SANA's transformer"):
        load_backbone(str(folder))


def test_several_files_and_one_of_something_else_are_refused_by_name(folder: Path) -> None:
    other = folder / "transformer" / "optimizer.pth"
    other.write_bytes(b"no tensors")
    with pytest.raises(OSError, match=r"optimizer\.pth' is not a checkpoint of plain tensors"):
        load_backbone(str(folder))
    other.unlink()
    put(folder, native(), "state_dict")
    put(folder, native(), "safetensors")
    with pytest.raises(OSError, match=r"contains SANA_LinearFFN\.pth, SANA_LinearFFN\.safetensors; expected"):
        load_backbone(str(folder))


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


def test_a_dtype_is_kept_and_a_missing_tensor_named(tmp_path: Path) -> None:
    loaded = load_backbone(str(rewritten(tmp_path / "whole", 1)), dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.transformer.parameters()} == {torch.bfloat16}
    lacking = "transformer_blocks.0.attn1.to_q.weight"
    with pytest.raises(OSError, match=lacking):
        load_backbone(str(rewritten(tmp_path / "sana", 2, drop=lacking)))
