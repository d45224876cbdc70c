"""LoRAs in the layouts of ComfyUI and kohya: ComfyUI's key rules and diffusers' loaders find our change of weights."""

import re
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from diffusers import Flux2KleinPipeline, FluxPipeline, QwenImagePipeline, WanPipeline, ZImagePipeline
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.families.lora_layouts import ModuleChange, by_module, read_layers
from solrl_core.families.original_layers import ORIGINAL_LAYERS, Layout, encode_in_layout
from solrl_core.lora import adapter_layout
from tests.core.families.tiny_models import ONE_EACH, Tiny

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


def read(file: dict[str, torch.Tensor], family: str) -> dict[str, ModuleChange]:
    """The changes of a file, with regard to alpha, of blocks 0 and 1."""
    layers = [replace(layer, b=layer.b * (layer.alpha or layer.rank) / layer.rank) for layer in read_layers(file)]
    return by_module(layers, family, an_adapter(family, 1, 1.0).modules)


@pytest.mark.parametrize("tiny", [name for name in ONE_EACH if name != "sana/mini"], indirect=True)
def test_every_layer_that_lora_adapts_has_a_name(tiny: Tiny) -> None:
    layout = adapter_layout(tiny.backbone.transformer, tiny.backbone.lora_targets)
    known = [module for layer in ORIGINAL_LAYERS[tiny.backbone.family] for module in layer.modules]
    assert sorted(known) == sorted({re.sub(r"\d+", "{}", name, count=1) for name in layout})


COMFYUI_SD3 = {
    **{f"to_{c}": ("x_block.attn.qkv", slice(8 * i, 8 * i + 8)) for i, c in enumerate("qkv")},
    **{f"add_{c}_proj": ("context_block.attn.qkv", slice(8 * i, 8 * i + 8)) for i, c in enumerate("qkv")},
    **{"to_out.0": ("x_block.attn.proj", slice(0, 8)), "to_add_out": ("context_block.attn.proj", slice(0, 8))},
}
"""Our layer of a block → ComfyUI's and its rows, as `mmdit_to_diffusers`; diffusers reads the other families' files."""


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
def test_what_was_written_is_read_back(family: str, layout: Layout, rank: int, alpha: float) -> None:
    adapter = an_adapter(family, rank, alpha)
    changes = read(safetensors.torch.load(encode_in_layout(adapter, family, layout)), family)
    assert sorted(changes) == list(adapter.modules)
    for module, (a, b) in changes.items():
        assert len(a) == rank
        torch.testing.assert_close(b @ a, adapter.delta(module), rtol=1e-5, atol=1e-5)


@LAYOUTS
@RATIOS
def test_comfyui_makes_our_change_of_sd3(layout: Layout, rank: int, alpha: float) -> None:
    adapters = [an_adapter("sd3", rank, alpha), an_adapter("sd3", rank + 1, 1.3, seed=1)]
    weights = {f"joint_blocks.{i}.{name}" for i in (0, 1) for name, _ in COMFYUI_SD3.values()}
    files = [safetensors.torch.load(encode_in_layout(adapter, "sd3", layout)) for adapter in adapters]
    one, other = (comfyui_changes(file, weights) for file in files)
    for module in adapters[0].modules:
        _, block, _, layer = module.split(".", 3)
        name, rows = COMFYUI_SD3[layer]
        both = (one[f"joint_blocks.{block}.{name}"] + other[f"joint_blocks.{block}.{name}"])[rows]
        expected = adapters[0].delta(module) + adapters[1].delta(module)
        torch.testing.assert_close(both, expected, rtol=1e-5, atol=1e-5)


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
def test_diffusers_reads_it(family: str, pipeline: type, layouts: tuple[Layout, ...]) -> None:
    adapter = an_adapter(family, 3, 5.0, wide=3072 if family == "flux" else 8)  # it knows only FLUX.1's width
    for layout in layouts:
        file = safetensors.torch.load(encode_in_layout(adapter, family, layout))
        converted = pipeline.lora_state_dict(file)  # type: ignore[attr-defined]
        for module in adapter.modules:
            up, down = (converted.pop(f"transformer.{module}.lora_{part}.weight") for part in "BA")
            torch.testing.assert_close((up @ down)[:64], adapter.delta(module)[:64], rtol=1e-4, atol=1e-4)
        assert not any(tensor.any() for key, tensor in converted.items() if "lora_B" in key), "nothing else changes"


@LAYOUTS
def test_rows_of_the_mlp_are_refused(layout: Layout) -> None:
    file = safetensors.torch.load(encode_in_layout(an_adapter("flux", 2, 2.0), "flux", layout))
    key = next(key for key in file if key.endswith("linear1.lora_up.weight"))
    file[key][-1, 0] = 1.0
    with pytest.raises(ValueError, match=rf"changes rows from 24 on in {key}: it adapts the MLP, which this run does"):
        read(file, "flux")


@pytest.mark.parametrize("rows", [0, 2, 8, 25])
def test_heights_of_another_model_are_refused(rows: int) -> None:
    key = "diffusion_model.double_blocks.0.img_attn.qkv"
    file = {f"{key}.lora_A.weight": torch.ones(1, 8), f"{key}.lora_B.weight": torch.ones(rows, 1)}
    with pytest.raises(
        ValueError, match=rf"has {rows} rows in {key}\.lora_B\.weight; expected a multiple of 3: a LoRA"
    ):
        read(file, "flux")


def test_what_has_no_name_is_refused() -> None:
    adapter = an_adapter("sd3", 2, 2.0)
    with pytest.raises(ValueError, match=r"comfyui has no names for the family sana; expected one of flux, "):
        encode_in_layout(adapter, "sana", "comfyui")
    with pytest.raises(ValueError, match=r"kohya has no name for transformer_blocks\.0\.attn\.add_k_proj of the fam"):
        encode_in_layout(adapter, "flux", "kohya")


@FAMILIES
@pytest.mark.parametrize("prefix", ["diffusion_model.", "transformer.", "base_model.model.", "lora_unet_"])
def test_diffusers_names_are_read_under_any_prefix(family: str, prefix: str) -> None:
    adapter = an_adapter(family, 2, 2.0)  # as ai-toolkit and musubi-tuner name layers of Z-Image and Qwen-Image
    file = {}
    for module in adapter.modules:
        name = prefix + (module.replace(".", "_") if prefix == "lora_unet_" else module)
        file[f"{name}.lora_down.weight"] = adapter.tensors[lora_a_key(module)]
        file[f"{name}.lora_up.weight"] = adapter.tensors[lora_b_key(module)]
    changes = read(file, family)
    assert sorted(changes) == list(adapter.modules)
    assert all(torch.equal(b @ a, adapter.delta(module)) for module, (a, b) in changes.items())


@FAMILIES
def test_a_layer_of_no_module_is_named(family: str) -> None:
    file = safetensors.torch.load(encode_in_layout(an_adapter(family, 2, 2.0), family, "kohya"))
    file |= {f"lora_unet_final_layer_linear.lora_{part}.weight": torch.ones(2, 2) for part in ("up", "down")}
    with pytest.raises(ValueError, match=r"1 modules .*, such as final_layer_linear; expected .* merge this"):
        read(file, family)
