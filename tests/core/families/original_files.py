"""Weights by the names of a model's authors, from those of diffusers: its conversions, inverted."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]

COMFY = "model.diffusion_model."

_EMBEDDERS = {
    rf"^time_text_embed\.{old}_embedder\.linear_{number}": f"{new}_in.{layer}_layer"
    for old, new in (("timestep", "time"), ("text", "vector"), ("guidance", "guidance"))
    for number, layer in ((1, "in"), (2, "out"))
}
_FLUX = _EMBEDDERS | {
    **{r"^context_embedder": "txt_in", r"^x_embedder": "img_in", r"^proj_out": "final_layer.linear"},
    r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
    r"^single_transformer_blocks\.(\d+)\.norm\.linear": r"single_blocks.\1.modulation.lin",
    r"^single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight": r"single_blocks.\1.norm.query_norm.scale",
    r"^single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight": r"single_blocks.\1.norm.key_norm.scale",
    r"^single_transformer_blocks\.(\d+)\.proj_out": r"single_blocks.\1.linear2",
    r"^transformer_blocks\.": "double_blocks.",
    **{r"\.norm1\.linear": ".img_mod.lin", r"\.norm1_context\.linear": ".txt_mod.lin"},
    r"\.attn\.norm_q\.weight": ".img_attn.norm.query_norm.scale",
    r"\.attn\.norm_k\.weight": ".img_attn.norm.key_norm.scale",
    r"\.attn\.norm_added_q\.weight": ".txt_attn.norm.query_norm.scale",
    r"\.attn\.norm_added_k\.weight": ".txt_attn.norm.key_norm.scale",
    **{r"\.attn\.to_out\.0": ".img_attn.proj", r"\.attn\.to_add_out": ".txt_attn.proj"},
    **{r"\.ff\.net\.0\.proj": ".img_mlp.0", r"\.ff\.net\.2": ".img_mlp.2"},
    **{r"\.ff_context\.net\.0\.proj": ".txt_mlp.0", r"\.ff_context\.net\.2": ".txt_mlp.2"},
}
_SD3 = {
    **{r"^pos_embed\.pos_embed": "pos_embed", r"^pos_embed\.proj": "x_embedder.proj"},
    r"^time_text_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
    r"^time_text_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
    r"^time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
    r"^time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
    r"^proj_out": "final_layer.linear",
    r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
    r"^transformer_blocks\.": "joint_blocks.",
    r"\.norm1\.linear": ".x_block.adaLN_modulation.1",
    r"\.norm1_context\.linear": ".context_block.adaLN_modulation.1",
    r"\.attn\.norm_added_([qk])": r".context_block.attn.ln_\1",
    r"\.(attn2?)\.norm_([qk])": r".x_block.\1.ln_\2",
    r"\.(attn2?)\.to_out\.0": r".x_block.\1.proj",
    r"\.attn\.to_add_out": ".context_block.attn.proj",
    **{r"\.ff\.net\.0\.proj": ".x_block.mlp.fc1", r"\.ff\.net\.2": ".x_block.mlp.fc2"},
    **{rf"\.ff_context\.net\.{old}": f".context_block.mlp.{new}" for old, new in ((r"0\.proj", "fc1"), ("2", "fc2"))},
}
_FLUX2 = {
    **{r"^x_embedder": "img_in", r"^context_embedder": "txt_in"},
    r"^time_guidance_embed\.timestep_embedder\.linear_1": "time_in.in_layer",
    r"^time_guidance_embed\.timestep_embedder\.linear_2": "time_in.out_layer",
    r"_modulation(\w*)\.linear": r"_modulation\1.lin",
    r"^proj_out": "final_layer.linear",
    r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
    r"^single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight": r"single_blocks.\1.norm.query_norm.scale",
    r"^single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight": r"single_blocks.\1.norm.key_norm.scale",
    r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj": r"single_blocks.\1.linear1",
    r"^single_transformer_blocks\.(\d+)\.attn\.to_out": r"single_blocks.\1.linear2",
    **{r"\.ff\.linear_in": ".img_mlp.0", r"\.ff\.linear_out": ".img_mlp.2"},
    **{r"\.ff_context\.linear_in": ".txt_mlp.0", r"\.ff_context\.linear_out": ".txt_mlp.2"},
} | {pattern: new for pattern, new in _FLUX.items() if pattern.startswith((r"^transformer_blocks", r"\.attn"))}
_Z_IMAGE = {
    r"^all_final_layer\.2-1": "final_layer",
    r"^all_x_embedder\.2-1": "x_embedder",
    r"\.attention\.norm_([qk])": r".attention.\1_norm",
    r"\.attention\.to_out\.0": ".attention.out",
}
_SANA = {
    r"^patch_embed\.proj": "x_embedder.proj",
    r"^caption_projection\.linear_(\d)": r"y_embedder.y_proj.fc\1",
    r"^caption_norm": "attention_y_norm",
    r"^time_embed\.emb\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
    r"^time_embed\.emb\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
    r"^time_embed\.linear": "t_block.1",
    **{r"^proj_out": "final_layer.linear", r"^scale_shift_table": "final_layer.scale_shift_table"},
    r"^transformer_blocks": "blocks",
    **{r"\.attn1\.to_out\.0": ".attn.proj", r"\.attn2\.to_out\.0": ".cross_attn.proj"},
    r"\.attn2\.to_q": ".cross_attn.q_linear",
    r"\.ff\.conv_(\w+)": r".mlp.\1_conv.conv",
}
_VAE = {
    r"\.down_blocks\.(\d)\.resnets\.": r".down.\1.block.",
    r"\.down_blocks\.(\d)\.downsamplers\.0": r".down.\1.downsample",
    r"\.up_blocks\.(\d)\.resnets\.": r".up.\1.block.",
    r"\.up_blocks\.(\d)\.upsamplers\.0": r".up.\1.upsample",
    **{rf"\.mid_block\.resnets\.{i}": f".mid.block_{i + 1}" for i in (0, 1)},
    **{r"\.mid_block\.attentions\.0": ".mid.attn_1", r"\.group_norm": ".norm", r"\.to_out\.0": ".proj_out"},
    **{r"\.to_([qkv])\.": r".\1.", r"\.conv_shortcut": ".nin_shortcut", r"\.conv_norm_out": ".norm_out"},
}


def flux(weights: Mapping[str, torch.Tensor]) -> Weights:
    """FLUX.1's transformer as Black Forest Labs names it."""
    given = dict(weights)
    _swap(given, "norm_out.linear")
    parts = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    made = _fused(given, r"single_transformer_blocks\.(\d+)\.", parts, r"single_blocks.\2.linear1")
    return made | _double_attention(given) | _renamed(given, _FLUX)


def flux2(weights: Mapping[str, torch.Tensor]) -> Weights:
    """FLUX.2's transformer as Black Forest Labs names it."""
    given = dict(weights)
    _swap(given, "norm_out.linear")
    return _double_attention(given) | _renamed(given, _FLUX2)


def z_image(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Z-Image's transformer as ComfyUI stores it."""
    given = dict(weights)
    return _fused(given, r"\w+\.\d+\.attention\.", ("to_q", "to_k", "to_v"), r"\1qkv") | _renamed(given, _Z_IMAGE)


def sana(weights: Mapping[str, torch.Tensor]) -> Weights:
    """SANA's transformer as in SANA_LinearFFN.pth, with linear layers for 1×1 convolutions."""
    given = dict(weights)
    made: Weights = {"pos_embed": torch.zeros(1), "y_embedder.y_embedding": torch.zeros(1)}
    for parts, new in (
        (("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn.qkv"),
        (("attn2.to_k", "attn2.to_v"), "cross_attn.kv_linear"),
    ):
        made |= _fused(given, r"transformer_blocks\.(\d+)\.", parts, rf"blocks.\2.{new}")
    for name, weight in _renamed(given, _SANA).items():
        if ".inverted_conv." in name or ".point_conv." in name:
            name = name.replace("_conv.conv", "_conv.linear")
            weight = weight[..., 0, 0] if weight.ndim == 4 else weight
        made[name] = weight
    return made


def _double_attention(given: Weights) -> Weights:
    """The fused projections of blocks with two streams, taken out of `given`."""
    made: Weights = {}
    for streams, new in ((("to_q", "to_k", "to_v"), "img"), (("add_q_proj", "add_k_proj", "add_v_proj"), "txt")):
        parts = tuple(f"attn.{one}" for one in streams)
        made |= _fused(given, r"transformer_blocks\.(\d+)\.", parts, rf"double_blocks.\2.{new}_attn.qkv")
    return made


def sd3(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Stable Diffusion 3's transformer as Stability AI names it."""
    given = dict(weights)
    last = max(int(name.split(".")[1]) for name in given if name.startswith("transformer_blocks."))
    _swap(given, "norm_out.linear")
    _swap(given, f"transformer_blocks.{last}.norm1_context.linear")
    made: Weights = {}
    for attention, streams, new in (
        ("attn", ("to_q", "to_k", "to_v"), "x_block.attn"),
        ("attn2", ("to_q", "to_k", "to_v"), "x_block.attn2"),
        ("attn", ("add_q_proj", "add_k_proj", "add_v_proj"), "context_block.attn"),
    ):
        parts = tuple(f"{attention}.{one}" for one in streams)
        made |= _fused(given, r"transformer_blocks\.(\d+)\.", parts, rf"joint_blocks.\2.{new}.qkv")
    return made | _renamed(given, _SD3)


def vae(weights: Mapping[str, torch.Tensor]) -> Weights:
    """An image autoencoder as in the latent diffusion code and in ae.safetensors."""
    levels = 1 + max(int(found[1]) for name in weights if (found := re.search(r"up_blocks\.(\d)", name)))
    made = {}
    for name, weight in _renamed(weights, _VAE).items():
        turned = re.sub(r"\.up\.(\d)", lambda found: f".up.{levels - 1 - int(found[1])}", name)
        made[turned] = weight[..., None, None] if ".attn_1." in name and weight.ndim == 2 else weight
    return made


def prefixed(weights: Mapping[str, torch.Tensor], prefix: str) -> Weights:
    """The same under another prefix."""
    return {prefix + name: weight for name, weight in weights.items()}


def read(folder: Path, part: str) -> Weights:
    """The weights of a part of a folder."""
    (file,) = (folder / part).glob("*.safetensors")
    return load_file(file)


def write(file: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """Write a file, with its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file, {"format": "pt"})
    return file


def _renamed(weights: Mapping[str, torch.Tensor], rules: Mapping[str, str]) -> Weights:
    made = {}
    for name, weight in weights.items():
        new = name
        for pattern, replacement in rules.items():
            new = re.sub(pattern, replacement, new)
        made[new] = weight
    return made


def _fused(weights: Weights, block: str, parts: tuple[str, ...], new: str) -> Weights:
    """The rows of each block's `parts`, taken out of `weights`; in `new`, \\1 is the block and \\2 its number."""
    first = re.compile(rf"^({block}){re.escape(parts[0])}\.(weight|bias)$")
    found = {}
    for match in filter(None, map(first.match, list(weights))):
        start, end = match[1], match[match.lastindex or 0]
        found[f"{match.expand(new)}.{end}"] = torch.cat([weights.pop(f"{start}{part}.{end}") for part in parts])
    return found


def _swap(weights: Weights, layer: str) -> None:
    """Put the shift before the scale."""
    for name in {f"{layer}.weight", f"{layer}.bias"} & weights.keys():
        scale, shift = weights[name].chunk(2)
        weights[name] = torch.cat([shift, scale])
