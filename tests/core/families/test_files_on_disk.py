"""Checkpoints as people have them: single files of each layout, variants, shards, FP8, and what is said of bad ones."""

import json
import logging
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from huggingface_hub import constants
from safetensors.torch import load_file
from solrl_core import diagnosis
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.fingerprint import part_digests
from solrl_core.sampling.generator import Generator
from tests.core.families import original_files as original
from tests.core.families.tiny_pipelines import write_flux2_klein, write_qwen_image, write_sd3, write_z_image

QKV = "joint_blocks.0.x_block.attn.qkv.weight"
MINI_SD3, MINI_FLUX, MINI_SANA = (Path(locate(name)) for name in ("mini-sd3", "mini-flux", "mini-sana"))


def same(given: PipelineBackbone, folder: Path) -> None:
    """Hold that a model has the weights, digests and images of a folder."""
    expected, image = loaded(folder)
    for name, part in expected.parts.items():
        if isinstance(part, torch.nn.Module):
            theirs = given.parts[name].state_dict()
            assert all(torch.equal(theirs[key], weight) for key, weight in part.state_dict().items()), name
    assert part_digests(given.parts) == part_digests(expected.parts)
    assert torch.equal(image_of(given), image)


@cache
def loaded(folder: Path) -> tuple[PipelineBackbone, torch.Tensor]:
    """The model of a folder, and its image."""
    backbone = load_backbone(str(folder))
    return backbone, image_of(backbone)


def image_of(backbone: PipelineBackbone) -> torch.Tensor:
    return Generator(backbone, "bf16").generate("a red circle", [3], steps=2).images


def mini_sd3(prefix: str = "") -> original.Weights:
    return original.prefixed(original.sd3(original.read(MINI_SD3, "transformer")), prefix)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of mini-sd3 to change."""
    return Path(shutil.copytree(MINI_SD3, tmp_path / "mini-sd3"))


@pytest.mark.parametrize("prefix", ["", original.COMFY])
def test_an_original_file_and_comfyuis_are_the_folders_transformer(tmp_path: Path, folder: Path, prefix: str) -> None:
    file = original.write(tmp_path / "sd3.5_mini.safetensors", mini_sd3(prefix))
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()  # the folder need not have it
    given = load_backbone(f"{file}+{folder}")
    same(given, MINI_SD3)
    assert given.name == "sd3.5_mini"
    assert load_skeleton(f"{file}+{folder}").latent_shape == given.latent_shape


def test_files_of_the_authors_in_the_models_folder_need_no_other_name(folder: Path) -> None:
    weights = original.vae(original.read(folder, "vae"))
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    original.write(folder / "vae" / "ae.safetensors", weights)
    same(load_backbone(str(folder)), MINI_SD3)
    file = original.write(folder / "sd3.5_mini.safetensors", mini_sd3(original.COMFY))
    same(load_backbone(str(file)), MINI_SD3)


def test_an_all_in_one_file_gives_what_it_has(tmp_path: Path, folder: Path) -> None:
    vae = original.vae(original.read(MINI_SD3, "vae"))
    weights = mini_sd3(original.COMFY) | original.prefixed(vae, "first_stage_model.")
    for encoder, part in {"clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5xxl": "text_encoder_3"}.items():
        weights |= original.prefixed(original.read(MINI_SD3, part), f"text_encoders.{encoder}.transformer.")
        weights[f"text_encoders.{encoder}.logit_scale"] = torch.ones(())
    file = original.write(tmp_path / "all.safetensors", weights)
    for weighed in folder.glob("*/*.safetensors"):
        weighed.unlink()
    same(load_backbone(f"{file}+{folder}"), MINI_SD3)


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (partial(write_sd3, sd35=True), original.sd3),  # with dual attention
        (write_z_image, original.z_image),
        (write_flux2_klein, original.flux2),
        (write_qwen_image, original.Weights),  # its authors' names are those of diffusers
        (write_z_image, original.Weights),
    ],
)
def test_other_models_have_comfyuis_files_too(
    tmp_path: Path, write: Callable[[Path], Path], names: Callable[[original.Weights], original.Weights]
) -> None:
    folder = write(tmp_path / "model")
    weights = original.prefixed(names(original.read(folder, "transformer")), original.COMFY)
    same(load_backbone(f"{original.write(tmp_path / 'comfy.safetensors', weights)}+{folder}"), folder)


@pytest.fixture
def sana(tmp_path: Path) -> Path:
    """A copy of mini-sana to change."""
    return Path(shutil.copytree(MINI_SANA, tmp_path / "mini-sana"))


def put(folder: Path, file: str, key: str, weights: original.Weights) -> None:
    """Put a file of weights, under a key if it is a pickle, in the place of the transformer's own."""
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink(missing_ok=True)
    path = folder / "transformer" / file
    if path.suffix == ".pth":
        torch.save({key: weights} if key else weights, path)
    else:
        original.write(path, weights)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize(
    ("file", "key"),
    [
        *(("SANA_LinearFFN.pth", key) for key in ("state_dict", "model", "")),
        ("SANA_LinearFFN.safetensors", ""),
        ("diffusion_pytorch_model.safetensors", ""),
    ],
)
def test_a_sana_of_its_authors_is_the_folders_transformer(sana: Path, file: str, key: str, linear: bool) -> None:
    weights = original.sana(original.read(MINI_SANA, "transformer"))
    for name in [] if linear else [name for name in weights if "_conv.linear." in name]:
        weight = weights.pop(name)
        weights[name.replace("linear", "conv")] = weight[..., None, None] if weight.ndim == 2 else weight
    put(sana, file, key, weights)
    same(load_backbone(str(sana)), MINI_SANA)


def test_norms_of_sana_1_5_in_its_authors_file_are_read(sana: Path) -> None:
    config = sana / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"qk_norm": "rms_norm_across_heads"}))
    given = original.read(sana, "transformer")
    width = given["transformer_blocks.0.attn1.to_q.weight"].shape[0]
    blocks = {name.split(".")[1] for name in given if name.startswith("transformer_blocks.")}
    parts = {"attn.q": "attn1.norm_q", "cross_attn.k": "attn2.norm_k", "attn.k": "attn1.norm_k"}
    parts["cross_attn.q"] = "attn2.norm_q"
    drawn = {(block, part): torch.rand(width).bfloat16().float() for block in blocks for part in parts}
    norms = {f"blocks.{block}.{part}_norm.weight": weight for (block, part), weight in drawn.items()}
    put(sana, "SANA1.5.pth", "state_dict", original.sana(given) | norms)
    found = load_backbone(str(sana)).transformer.state_dict()
    for (block, part), weight in drawn.items():
        assert torch.equal(found[f"transformer_blocks.{block}.{parts[part]}.weight"], weight)


@pytest.mark.parametrize("shards", [0, 3])
def test_a_sana_with_linear_layers_by_names_of_diffusers_is_loaded(sana: Path, shards: int) -> None:
    weights = original.read(sana, "transformer")
    linear = {name: weights[name].flatten(1) for name in weights if name.endswith(("inverted.weight", "point.weight"))}
    put(sana, "diffusion_pytorch_model.safetensors", "", weights | linear)
    variant(sana / "transformer", "", shards)
    given = load_backbone(str(sana))
    same(given, MINI_SANA)
    assert not given.transformer.training
    assert not any(weight.requires_grad for weight in given.transformer.parameters())
    assert load_backbone(str(sana), dtype=torch.bfloat16).transformer.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"logvar_linear.weight": torch.zeros(1, 64)}, "also has logvar_linear.weight"),
        ({"blocks.1.attn.qkv.weight": None}, "it has no 'blocks.1.attn.qkv.weight'"),
        ({"blocks.0.mlp.point_conv.linear.weight": None}, "it has no 'blocks.0.mlp.point_conv.conv.weight'"),
        ({"blocks.0.attn.qkv.weight": torch.zeros(192, 192)}, "in another shape .*0.attn1.to_k.weight"),
        ({"blocks.5.attn.proj.bias": torch.zeros(192)}, "it has no 'blocks.5."),
    ],
)
def test_a_misfit_of_sana_is_named(sana: Path, change: dict[str, torch.Tensor | None], fault: str) -> None:
    weights = original.sana(original.read(sana, "transformer")) | change
    put(sana, "SANA_LinearFFN.pth", "", {name: weight for name, weight in weights.items() if weight is not None})
    with pytest.raises(OSError, match=rf"SANA_LinearFFN\.pth .*{fault}"):
        load_backbone(str(sana))


def test_a_pickle_of_anything_else_is_refused_and_so_are_two_files(sana: Path) -> None:
    put(sana, "optimizer.pth", "", {})
    (sana / "transformer" / "optimizer.pth").write_bytes(b"no tensors")
    with pytest.raises(OSError, match=r"optimizer\.pth' is not a checkpoint of plain tensors"):
        load_backbone(str(sana))
    put(sana, "SANA_LinearFFN.safetensors", "", {"some": torch.zeros(1)})
    with pytest.raises(OSError, match="lacks transformer/diffusion_pytorch_model"):
        load_backbone(str(sana))


@pytest.mark.release
def test_flux_of_the_released_width_is_converted(tmp_path: Path) -> None:
    # diffusers' conversion takes no other width.
    folder = Path(shutil.copytree(MINI_FLUX, tmp_path / "flux"))
    config = json.loads((folder / "transformer" / "config.json").read_text())
    config |= {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(**config | {"num_layers": 1, "num_single_layers": 1}).to(torch.bfloat16)
    transformer.to_empty(device="cpu")
    noise = 0.02 * torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).bfloat16()
    for weight in transformer.parameters():
        weight.data.copy_(noise.repeat(weight.numel() // len(noise) + 1)[: weight.numel()].view_as(weight))
    transformer.save_pretrained(folder / "transformer")
    weights = original.flux(original.read(folder, "transformer"))
    file = original.write(tmp_path / "flux1-dev.safetensors", weights)
    given, expected = (load_backbone(where, dtype=torch.bfloat16) for where in (f"{file}+{folder}", str(folder)))
    assert part_digests(given.parts) == part_digests(expected.parts)
    images = [Generator(one, "bf16").generate("a red circle", [3], steps=1).images for one in (given, expected)]
    assert torch.equal(*images)


def variant(part: Path, name: str, shards: int = 0) -> None:
    """Store the weights of a part as another variant, in shards if there are any."""
    (file,) = part.glob("*.safetensors")
    weights = {key: weight.half() if name == "fp16" else weight for key, weight in load_file(file).items()}
    file.unlink()
    stem = f"{file.stem}.{name}" if name else file.stem
    if not shards:
        original.write(part / f"{stem}.safetensors", weights)
        return
    keys = sorted(weights)
    placed = {}
    for at in range(shards):
        shard = f"{stem}-{at + 1:05}-of-{shards:05}.safetensors"
        original.write(part / shard, {key: weights[key] for key in keys[at::shards]})
        placed |= dict.fromkeys(keys[at::shards], shard)
    index = {"metadata": {"total_size": sum(weight.nbytes for weight in weights.values())}, "weight_map": placed}
    ending = f"index.{name}.json" if name else "index.json"
    (part / f"{file.stem}.safetensors.{ending}").write_text(json.dumps(index))


@pytest.mark.parametrize(("name", "shards"), [("bf16", 0), ("bf16", 2), ("fp16", 2), ("", 3)])
def test_variants_and_shards_are_loaded(folder: Path, name: str, shards: int) -> None:
    variant(folder / "transformer", name, shards)
    variant(folder / "text_encoder_3", name, shards)
    given = load_backbone(str(folder))
    if name != "fp16":
        same(given, MINI_SD3)
        return
    exact = load_backbone(str(MINI_SD3))
    for mine, theirs in zip(given.transformer.parameters(), exact.transformer.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.half().float().bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["", "bf16"])
def test_a_missing_shard_or_index_is_named(folder: Path, name: str) -> None:
    variant(folder / "text_encoder_3", name, 2)
    (second,) = (folder / "text_encoder_3").glob("*-00002-of-00002.safetensors")
    kept = second.rename(folder / "kept")
    with pytest.raises(OSError, match=f"lacks text_encoder_3/{second.name}; copy them there"):
        load_backbone(str(folder))
    assert f"it lacks text_encoder_3/{second.name}" in diagnosis.model(str(folder)).text
    kept.rename(second)
    assert diagnosis.model(str(folder)).state == "ok"
    (index,) = (folder / "text_encoder_3").glob("*.index.*json")
    index.unlink()
    with pytest.raises(OSError, match=f"lacks text_encoder_3/{index.name}; copy them there"):
        load_backbone(str(folder))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "t5xxl_fp8_e4m3fn.safetensors", "t5xxl_fp8_e4m3fn_scaled.safetensors"]
)
def test_an_fp8_text_encoder_is_loaded_with_a_note(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    part = folder / "text_encoder_3"
    weights = original.read(folder, "text_encoder_3")
    scale = 0.5 if "scaled" in name else 1.0
    stored = {key: (weight.float() / scale).to(torch.float8_e4m3fn) for key, weight in weights.items()}
    expected = {key: (weight.float() * scale).bfloat16().float() for key, weight in stored.items()}
    scaled = {f"{key.removesuffix('weight')}scale_weight": torch.tensor(scale) for key in stored} if scale != 1 else {}
    (part / "model.safetensors").unlink()
    original.write(part / name, stored | scaled | ({"scaled_fp8": torch.zeros(2)} if scaled else {}))
    with caplog.at_level(logging.WARNING):
        given = load_backbone(str(folder))
    encoder = given.parts["text_encoder_3"].state_dict()
    assert all(torch.equal(encoder[key], weight) for key, weight in expected.items())
    assert f"{name}: {len(weights)} FP8 weights are loaded as their BF16 values" in caplog.text
    assert load_backbone(str(folder), dtype=torch.bfloat16).parts["text_encoder_3"].dtype == torch.bfloat16


def test_an_fp8_transformer_in_comfyuis_layout_is_loaded_as_bf16_values(tmp_path: Path) -> None:
    stored = {name: weight.to(torch.float8_e4m3fn) for name, weight in mini_sd3(original.COMFY).items()}
    kept = {name: weight.bfloat16() for name, weight in stored.items()}
    given, expected = (
        load_backbone(f"{original.write(tmp_path / name, weights)}+mini-sd3")
        for name, weights in {"fp8.safetensors": stored, "bf16.safetensors": kept}.items()
    )
    assert part_digests(given.parts) == part_digests(expected.parts)


def without(weights: original.Weights, part: str) -> original.Weights:
    return {name: weight for name, weight in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (lambda whole: without(whole, "x_block.attn.qkv"), "it has no 'joint_blocks.0.x_block.attn.qkv.weight'"),
        (lambda whole: without(whole, "joint_blocks.3."), "lacks .*blocks.2.attn.to_add_out.bias, .* and 29 more"),
        (lambda whole: whole | {"lora_up": torch.ones(2)}, "also has lora_up; expected a complete file"),
        (lambda whole: whole | {"pos_embed": torch.ones(1, 4, 128)}, "has in another shape pos_embed.pos_embed"),
        (
            lambda whole: whole | {QKV: whole[QKV].to(torch.int8), f"{QKV}_scale": torch.ones(1)},  # integers
            f"it also has {QKV}_scale",
        ),
        (lambda whole: original.read(MINI_SD3, "vae"), "its first tensors are decoder.conv_in.bias"),
        (lambda whole: original.prefixed(whole, "vae."), "has weights of vae; expected a file with a transformer"),
    ],
)
def test_a_misfit_is_named(tmp_path: Path, made: Callable[[original.Weights], original.Weights], fault: str) -> None:
    file = original.write(tmp_path / "some.safetensors", made(mini_sd3()))
    with pytest.raises(OSError, match=rf"^{file}.*{fault}"):
        load_backbone(f"{file}+mini-sd3")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda whole: without(whole, "shared") | {"more": torch.ones(1)}, "T5.*lacks .*, shared.* also has more"),
        (lambda whole: whole | {"shared.weight": torch.zeros(7, 96)}, "it has in another shape .*shared.weight"),
    ],
)
def test_misfit_encoders(folder: Path, change: Callable[[original.Weights], original.Weights], fault: str) -> None:
    weights = original.read(folder, "text_encoder_3")
    (folder / "text_encoder_3" / "model.safetensors").unlink()
    original.write(folder / "text_encoder_3" / "t5.safetensors", change(weights))
    with pytest.raises(OSError, match=f"t5.safetensors .*{fault}"):
        load_backbone(str(folder))


def test_what_is_no_checkpoint_is_refused_with_what_to_type(tmp_path: Path) -> None:
    file = tmp_path / "flux1-dev.safetensors"
    with pytest.raises(ValueError, match=f"there is no file {file}"):
        load_backbone(f"{file}+mini-flux")
    with pytest.raises(ValueError, match=rf"got the checkpoint {file} alone; expected {file}\+FOLDER"):
        load_backbone(str(file))
    with pytest.raises(ValueError, match=r"flux1-dev.gguf; expected a checkpoint as safetensors"):
        load_backbone(str(file.with_suffix(".gguf")))
    file.write_bytes(original.write(tmp_path / "whole", mini_sd3()).read_bytes()[:-10])
    with pytest.raises(OSError, match="expected a whole safetensors file: copy it again"):
        load_backbone(f"{file}+mini-sd3")


def test_a_class_that_diffusers_cannot_read_from_one_file_is_refused(tmp_path: Path) -> None:
    folder = write_qwen_image(tmp_path / "model")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(folder / "vae" / "qwen_vae.safetensors")
    with pytest.raises(OSError, match="cannot read a single file for AutoencoderKLQwenImage; expected a folder"):
        load_backbone(str(folder))


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """mini-sd3 in the hub's cache, where the hub cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(MINI_SD3, repository / "snapshots" / ("0" * 40)))


def test_a_hub_cache_is_loaded_without_network(snapshot: Path, tmp_path: Path) -> None:
    same(load_backbone("some/model"), MINI_SD3)
    assert load_skeleton("some/model").family == "sd3"
    (snapshot / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    file = original.write(tmp_path / "sd3.5_mini.safetensors", mini_sd3())
    same(load_backbone(f"{file}+some/model"), MINI_SD3)


def test_a_file_that_a_hub_cache_lacks_is_named_with_the_command(snapshot: Path) -> None:
    lost = "text_encoder_3/model.safetensors"
    (snapshot / lost).unlink()
    with pytest.raises(OSError, match=f"{snapshot} lacks {lost}; .*run `hf download some/model {lost}`"):
        load_backbone("some/model")
    assert f"it lacks {lost}" in diagnosis.model("some/model").text


def test_doctor_looks_at_a_file_and_at_the_rest_of_its_folder(tmp_path: Path, folder: Path) -> None:
    file = original.write(tmp_path / "sd3.5_mini.safetensors", mini_sd3())
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    assert diagnosis.model(f"{file}+{folder}").state == "ok"
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert "it lacks vae/diffusion_pytorch_model.safetensors" in diagnosis.model(f"{file}+{folder}").text
    assert "alone; expected" in diagnosis.model(str(file)).text
    file.write_bytes(b"")
    assert "expected a whole safetensors file" in diagnosis.model(f"{file}+mini-sd3").text
