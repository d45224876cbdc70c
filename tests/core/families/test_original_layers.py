"""LoRAs in the layouts of ComfyUI and kohya: ComfyUI's key rules and diffusers' loaders find our change of weights."""

from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from diffusers import Flux2KleinPipeline, FluxPipeline, QwenImagePipeline, WanPipeline, ZImagePipeline
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.families.original_layers import ORIGINAL_LAYERS, Layout, encode_in_layout, from_layout

Key = str | tuple[str, int, int]
"""A weight of ComfyUI's model, or some of its rows: from the second, as many as the third."""

LAYOUTS = pytest.mark.parametrize("layout", ["comfyui", "kohya"])
RATIOS = pytest.mark.parametrize(("rank", "alpha"), [(2, 2.0), (3, 5.0), (4, 0.7)])
FAMILIES = pytest.mark.parametrize("family", sorted(ORIGINAL_LAYERS))


def an_adapter(family: str, rank: int, alpha: float, wide: int = 8, seed: int = 0) -> Adapter:
    """An adapter of all layers of blocks 0 and 1; FLUX.2's fused layer is 9 times as high."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in ORIGINAL_LAYERS[family]:
        for module in (name.format(block) for name in layer.modules for block in (0, 1)):
            rows = 9 * wide if module.endswith("to_qkv_mlp_proj") else wide
            tensors[lora_a_key(module)] = torch.randn(rank, wide, generator=generator)
            tensors[lora_b_key(module)] = torch.randn(rows, rank, generator=generator)
    return Adapter(rank, alpha, tensors)


def qkv(weight: str, names: list[str], wide: int) -> dict[str, Key]:
    return {name: (weight, index * wide, wide) for index, name in enumerate(names)}


def flux(i: int, w: int) -> dict[str, Key]:
    """Our module → weight and rows of ComfyUI's model, as `flux_to_diffusers`."""
    block = f"transformer_blocks.{i}.attn"
    single = f"single_transformer_blocks.{i}.attn"
    return {
        **qkv(f"double_blocks.{i}.img_attn.qkv", [f"{block}.to_{x}" for x in "qkv"], w),
        f"{block}.to_out.0": f"double_blocks.{i}.img_attn.proj",
        **qkv(f"single_blocks.{i}.linear1", [f"{single}.to_{x}" for x in "qkv"], w),
    }


def flux2(i: int, w: int) -> dict[str, Key]:
    block, theirs = f"transformer_blocks.{i}", f"double_blocks.{i}"
    return {
        **qkv(f"{theirs}.img_attn.qkv", [f"{block}.attn.to_{x}" for x in "qkv"], w),
        **qkv(f"{theirs}.txt_attn.qkv", [f"{block}.attn.add_{x}_proj" for x in "qkv"], w),
        f"{block}.attn.to_out.0": f"{theirs}.img_attn.proj",
        f"{block}.attn.to_add_out": f"{theirs}.txt_attn.proj",
        f"{block}.ff.linear_in": f"{theirs}.img_mlp.0",
        f"{block}.ff.linear_out": f"{theirs}.img_mlp.2",
        f"{block}.ff_context.linear_in": f"{theirs}.txt_mlp.0",
        f"{block}.ff_context.linear_out": f"{theirs}.txt_mlp.2",
        f"single_transformer_blocks.{i}.attn.to_qkv_mlp_proj": f"single_blocks.{i}.linear1",
    }


def sd3(i: int, w: int) -> dict[str, Key]:
    """As `mmdit_to_diffusers`."""
    block, theirs = f"transformer_blocks.{i}.attn", f"joint_blocks.{i}"
    return {
        **qkv(f"{theirs}.x_block.attn.qkv", [f"{block}.to_{x}" for x in "qkv"], w),
        **qkv(f"{theirs}.context_block.attn.qkv", [f"{block}.add_{x}_proj" for x in "qkv"], w),
        f"{block}.to_out.0": f"{theirs}.x_block.attn.proj",
        f"{block}.to_add_out": f"{theirs}.context_block.attn.proj",
    }


def z_image(i: int, w: int) -> dict[str, Key]:
    """As `z_image_to_diffusers`."""
    keys: dict[str, Key] = {}
    for block in (f"{name}.{i}.attention" for name in ("layers", "noise_refiner", "context_refiner")):
        keys |= qkv(f"{block}.qkv", [f"{block}.to_{x}" for x in "qkv"], w)
        keys[f"{block}.to_out.0"] = f"{block}.out"
    return keys


def qwen_image(i: int, w: int) -> dict[str, Key]:
    """ComfyUI's Qwen-Image has diffusers' names."""
    names = [f"attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")]
    names += ["attn.to_add_out", *(f"{x}_mlp.net.{y}" for x in ("img", "txt") for y in ("0.proj", "2"))]
    return {f"transformer_blocks.{i}.{name}": f"transformer_blocks.{i}.{name}" for name in names}


def wan(i: int, w: int) -> dict[str, Key]:
    """As the names of Wan's authors, which ComfyUI keeps."""
    parts = {"attn1": "self_attn", "attn2": "cross_attn"}
    names = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
    return {f"blocks.{i}.{a}.{b}": f"blocks.{i}.{parts[a]}.{names[b]}" for a in parts for b in names}


COMFYUI: dict[str, Callable[[int, int], dict[str, Key]]] = {
    "flux": flux,
    "flux2-klein": flux2,
    "sd3": sd3,
    "z-image": z_image,
    "qwen-image": qwen_image,
    "wan": wan,
}


def comfyui_changes(file: dict[str, torch.Tensor], weights: set[str]) -> dict[str, torch.Tensor]:
    """Each weight's change by ComfyUI's rules: names of `model_lora_keys_unet`, arithmetic of `LoRAAdapter`."""
    known: dict[str, str] = {}
    for name in weights:
        known[f"lora_unet_{name.replace('.', '_')}"] = known[f"diffusion_model.{name}"] = name
    changes, read = {}, set()
    for key, name in known.items():
        if f"{key}.lora_up.weight" in file:
            up, down, alpha = (file[f"{key}.{part}"] for part in ("lora_up.weight", "lora_down.weight", "alpha"))
            changes[name] = alpha.item() / down.shape[0] * (up @ down)
            read |= {f"{key}.{part}" for part in ("lora_up.weight", "lora_down.weight", "alpha")}
    assert read == file.keys(), "lora key not loaded"
    return changes


@LAYOUTS
@FAMILIES
@RATIOS
def test_comfyui_makes_our_change_and_we_read_it_back(family: str, layout: Layout, rank: int, alpha: float) -> None:
    adapters = [an_adapter(family, rank, alpha), an_adapter(family, rank + 1, 1.3, seed=1)]
    where = COMFYUI[family](0, 8) | COMFYUI[family](1, 8)
    assert where.keys() == set(adapters[0].modules)
    weights = {key if isinstance(key, str) else key[0] for key in where.values()}
    files = [safetensors.torch.load(encode_in_layout(adapter, family, layout)) for adapter in adapters]
    one, other = (comfyui_changes(file, weights) for file in files)
    for module, key in where.items():
        name, start, rows = (key, 0, len(one[key])) if isinstance(key, str) else key
        both = (one[name] + other[name])[start : start + rows]
        expected = adapters[0].delta(module) + adapters[1].delta(module)
        torch.testing.assert_close(both, expected, rtol=1e-5, atol=1e-5)
    if family == "flux":
        assert one["single_blocks.0.linear1"].shape == (7 * 8, 8)
        assert not one["single_blocks.0.linear1"][3 * 8 :].any(), "the MLP's rows are not adapted"
    read = from_layout(files[0], family)
    assert len(read) == len(adapters[0].tensors)
    for module in where:
        a, b = read[f"{module}.lora_A.weight"], read[f"{module}.lora_B.weight"]
        assert len(a) == rank
        torch.testing.assert_close(b @ a, adapters[0].delta(module), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "pipeline", "layouts"),
    [
        ("flux", FluxPipeline, ("comfyui", "kohya")),
        ("flux2-klein", Flux2KleinPipeline, ("kohya",)),
        ("qwen-image", QwenImagePipeline, ("comfyui", "kohya")),
        ("wan", WanPipeline, ("comfyui",)),
        ("z-image", ZImagePipeline, ("kohya",)),
    ],
)
@RATIOS
def test_diffusers_reads_it(family: str, pipeline: type, layouts: tuple[Layout, ...], rank: int, alpha: float) -> None:
    adapter = an_adapter(family, rank, alpha, wide=3072 if family == "flux" else 8)  # it knows only FLUX.1's width
    for layout in layouts:
        file = safetensors.torch.load(encode_in_layout(adapter, family, layout))
        read = pipeline.lora_state_dict(file)  # type: ignore[attr-defined]
        for module in adapter.modules:
            up, down = (read.pop(f"transformer.{module}.lora_{part}.weight") for part in "BA")
            torch.testing.assert_close((up @ down)[:64], adapter.delta(module)[:64], rtol=1e-4, atol=1e-4)
        assert not any(tensor.any() for key, tensor in read.items() if "lora_B" in key), "nothing else changes"


@LAYOUTS
def test_rows_of_the_mlp_are_refused(layout: Layout) -> None:
    file = safetensors.torch.load(encode_in_layout(an_adapter("flux", 2, 2.0), "flux", layout))
    key = next(key for key in file if key.endswith("linear1.lora_up.weight"))
    file[key][-1, 0] = 1.0
    with pytest.raises(ValueError, match=rf"{key} changes rows from 24 on: it adapts the MLP, which this run does"):
        from_layout(file, "flux")


@pytest.mark.parametrize("rows", [0, 2, 8, 25])
def test_heights_of_another_model_are_refused(rows: int) -> None:
    key = "diffusion_model.double_blocks.0.img_attn.qkv"
    file = {f"{key}.lora_A.weight": torch.ones(1, 8), f"{key}.lora_B.weight": torch.ones(rows, 1)}
    with pytest.raises(ValueError, match=rf"{key}\.lora_B\.weight has {rows} rows; expected a multiple of 3: a LoRA"):
        from_layout(file, "flux")


def test_what_has_no_name_is_refused() -> None:
    adapter = an_adapter("sd3", 2, 2.0)
    with pytest.raises(ValueError, match=r"comfyui has no names for the family sana; expected one of flux, "):
        encode_in_layout(adapter, "sana", "comfyui")
    with pytest.raises(ValueError, match=r"kohya has no name for transformer_blocks\.0\.attn\.add_k_proj of the fam"):
        encode_in_layout(adapter, "flux", "kohya")
    assert from_layout({"lora_unet_down_blocks_0.lora_up.weight": torch.ones(1, 1)}, "flux") is None
