"""Conversion of SANA weights from the authors' names (`blocks.0.attn.qkv.weight`) to those of diffusers.

Sol-RL's SANA was released in this format, with linear layers [out, in] instead of 1×1 convolutions in the feed-forward.

Names: github.com/NVlabs/Sana, diffusion/model/nets/{sana_multi_scale,basic_modules}_linear.py, and
tools/convert_sana_to_diffusers.py there, which handles convolutions only.
"""

import re
from collections.abc import Iterable, Mapping

import torch

_OUTSIDE = {
    "patch_embed.proj": "x_embedder.proj",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1",
    "caption_projection.linear_2": "y_embedder.y_proj.fc2",
    "caption_norm": "attention_y_norm",
    "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_embed.linear": "t_block.1",
    "proj_out": "final_layer.linear",
}
_IN_A_BLOCK = {
    "attn1.to_q": "attn.qkv[0/3]",
    "attn1.to_k": "attn.qkv[1/3]",
    "attn1.to_v": "attn.qkv[2/3]",
    "attn1.norm_q": "attn.q_norm",
    "attn1.norm_k": "attn.k_norm",
    "attn1.to_out.0": "attn.proj",
    "attn2.to_q": "cross_attn.q_linear",
    "attn2.to_k": "cross_attn.kv_linear[0/2]",
    "attn2.to_v": "cross_attn.kv_linear[1/2]",
    "attn2.norm_q": "cross_attn.q_norm",
    "attn2.norm_k": "cross_attn.k_norm",
    "attn2.to_out.0": "cross_attn.proj",
    "ff.conv_inverted": "mlp.inverted_conv.linear",
    "ff.conv_depth": "mlp.depth_conv.conv",
    "ff.conv_point": "mlp.point_conv.linear",
}
# The embedding of a dropped prompt, which diffusers replaces with that of the empty prompt, and a table of sines.
_UNUSED = {"y_embedder.y_embedding", "pos_embed"}


def is_native(names: Iterable[str]) -> bool:
    """Whether tensors have the authors' names."""
    return any(name.startswith(("blocks.", "x_embedder.")) for name in names)


def from_native(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, torch.Tensor]:
    """Convert weights to diffusers' names.

    Args:
        weights: tensors by the authors' names.
        expected: shape of every weight of the transformer, by diffusers' name.
        where: name of the source in error messages.

    Raises:
        ValueError: weights are missing, unexpected or of the wrong shape; names them as the authors do.
    """
    found, taken = {}, set[str]()
    missing, shapes = [], []
    for name, shape in expected.items():
        source, part, parts = _source(name, weights)
        if source not in weights:
            missing.append(source)
            continue
        taken.add(source)
        whole = weights[source]
        pointwise = shape[2:] == (1, 1) and whole.ndim == 2
        wanted = (shape[0] * parts, *(shape[1:2] if pointwise else shape[1:]))
        if tuple(whole.shape) != wanted:
            shapes.append(f"{source} {list(whole.shape)} (expected {list(wanted)})")
            continue
        piece = whole.chunk(parts)[part]
        found[name] = piece[..., None, None] if pointwise else piece
    problems = {"missing": missing, "unexpected": weights.keys() - taken - _UNUSED, "wrong shapes": shapes}
    if any(problems.values()):
        from solrl_core.rewards.loading import listed

        details = "; ".join(f"{problem}: {listed(set(names))}" for problem, names in problems.items() if names)
        raise ValueError(
            f"{where} contains {len(weights)} tensors, {details}; expected SANA's transformer with its authors' names, "
            "of the sizes in the config.json next to it"
        )
    return found


def _source(name: str, weights: Mapping[str, torch.Tensor]) -> tuple[str, int, int]:
    """The authors' name of a weight, the index of its part in that tensor, and the number of equal parts."""
    block = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name)
    prefix, inner = (f"blocks.{block[1]}.", block[2]) if block else ("", name)
    module, _, kind = inner.rpartition(".")
    if not module:  # a table of shifts and scales
        return f"{prefix or 'final_layer.'}{kind}", 0, 1
    theirs = (_IN_A_BLOCK if block else _OUTSIDE).get(module)
    if theirs is None:
        raise ValueError(f"config.json requires {name!r}, for which no name in the authors' format is known")
    cut = re.fullmatch(r"(.+)\[(\d)/(\d)\]", theirs)
    theirs, part, parts = (cut[1], int(cut[2]), int(cut[3])) if cut else (theirs, 0, 1)
    source = f"{prefix}{theirs}.{kind}"
    as_convolution = source.replace("_conv.linear.", "_conv.conv.")
    return (as_convolution if as_convolution in weights else source), part, parts
