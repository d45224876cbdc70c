"""Conversion of published HPSv2 (open_clip), ImageReward (BLIP) and HPSv3 checkpoints to transformers classes.

Each weight of the transformers class is looked up under its name in the checkpoint, so errors about missing,
unexpected or misshapen weights use the checkpoint's names. Sizes follow from the shapes; numbers of heads do not.

The converters take a .safetensors file, or a .pt file with its tensors at the top level or under "state_dict", and the
dtype of weights and arithmetic. They raise an OSError if there is no such file, and a ValueError if it is not such a
checkpoint.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from solrl_proto.text_files import read_json

from solrl_core.rewards.loading import listed, read_checkpoint

Take = Literal["whole", "transposed", 0, 1, 2]
"""Part of the source tensor that a weight is: whole, transposed, or the first, second or third of three equal parts."""

_OPEN_CLIP = (
    ("vision_model.", "visual."),
    ("text_model.", ""),
    ("visual_projection.weight", "visual.proj"),
    ("text_projection.weight", "text_projection"),
    ("encoder.layers.", "transformer.resblocks."),
    ("self_attn.out_proj.", "attn.out_proj."),
    ("layer_norm1.", "ln_1."),
    ("layer_norm2.", "ln_2."),
    ("mlp.fc1.", "mlp.c_fc."),
    ("mlp.fc2.", "mlp.c_proj."),
    ("embeddings.class_embedding", "class_embedding"),
    ("embeddings.patch_embedding.", "conv1."),
    ("embeddings.position_embedding.weight", "positional_embedding"),
    ("embeddings.token_embedding.", "token_embedding."),
    ("pre_layrnorm.", "ln_pre."),
    ("post_layernorm.", "ln_post."),
    ("final_layer_norm.", "ln_final."),
)
_BLIP = (
    ("vision.", "visual_encoder."),
    ("text.", "text_encoder."),
    ("visual_encoder.embeddings.class_embedding", "visual_encoder.cls_token"),
    ("visual_encoder.embeddings.position_embedding", "visual_encoder.pos_embed"),
    ("visual_encoder.embeddings.patch_embedding.", "visual_encoder.patch_embed.proj."),
    ("visual_encoder.encoder.layers.", "visual_encoder.blocks."),
    (".self_attn.qkv.", ".attn.qkv."),
    (".self_attn.projection.", ".attn.proj."),
    (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
    ("visual_encoder.post_layernorm.", "visual_encoder.norm."),
)
_QWEN = (("model.visual.", "visual."), ("model.language_model.", "model."))
# BLIP's contrastive projections and Qwen2-VL's language head, which rewards do not use, and constants.
_UNUSED = re.compile(r"(vision_proj|text_proj|lm_head)\.|(^|\.)(position_ids|attn_mask)$")


def open_clip_model(path: str, vision_heads: int, text_heads: int, dtype: torch.dtype) -> Any:
    """Load an open_clip checkpoint with exact GELU, such as HPSv2's, as a CLIPModel; ViT-H-14 has 16 and 16 heads."""
    from transformers import CLIPConfig, CLIPModel

    source = _Source(path, "an open_clip checkpoint such as HPS_v2.1_compressed.pt")
    vision_width, _, patch, _ = source.shape("visual.conv1.weight", 4)
    positions, _ = source.shape("visual.positional_embedding", 2)
    vocabulary, text_width = source.shape("token_embedding.weight", 2)
    length, _ = source.shape("positional_embedding", 2)
    _check_heads(vision_width, vision_heads, "vision_heads")
    _check_heads(text_width, text_heads, "text_heads")
    config = CLIPConfig(
        projection_dim=source.shape("text_projection", 2)[1],
        vision_config={
            "hidden_size": vision_width,
            "intermediate_size": source.shape("visual.transformer.resblocks.0.mlp.c_fc.weight", 2)[0],
            "num_hidden_layers": source.layers("visual.transformer.resblocks."),
            "num_attention_heads": vision_heads,
            "image_size": patch * round((positions - 1) ** 0.5),
            "patch_size": patch,
            "hidden_act": "gelu",
        },
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": text_width,
            "intermediate_size": source.shape("transformer.resblocks.0.mlp.c_fc.weight", 2)[0],
            "num_hidden_layers": source.layers("transformer.resblocks."),
            "num_attention_heads": text_heads,
            "max_position_embeddings": length,
            "hidden_act": "gelu",
            # The last two tokens of open_clip's vocabulary are start of text and end of text.
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
            "pad_token_id": 0,
        },
    )
    return source.load(CLIPModel, config, open_clip_name, dtype)


def image_reward_model(path: str, med_config: str, vision_heads: int, dtype: torch.dtype) -> Any:
    """Load a checkpoint in ImageReward's format, with or without the prefix "blip.", as an ImageRewardModel.

    BLIP's med_config.json gives heads, activation and epsilon of the text encoder. Its large vision encoder has 16.
    """
    from transformers import BlipConfig

    from solrl_core.rewards.blip import ImageRewardModel

    settings = _read_med_config(med_config)
    source = _Source(path, "ImageReward's own checkpoint, as ImageReward.pt", prefix="blip.")
    width, _, patch, _ = source.shape("visual_encoder.patch_embed.proj.weight", 4)
    positions = source.shape("visual_encoder.pos_embed", 3)[1]
    vocabulary, text_width = source.shape("text_encoder.embeddings.word_embeddings.weight", 2)
    linear = source.numbers(r"mlp\.layers\.(\d+)\.weight")
    _check_heads(width, vision_heads, "vision_heads")
    _check_heads(text_width, settings["num_attention_heads"], "num_attention_heads of med_config")
    config = BlipConfig(
        mlp_widths=[source.shape(f"mlp.layers.{number}.weight", 2)[0] for number in linear[:-1]],
        vision_config={
            "hidden_size": width,
            "intermediate_size": source.shape("visual_encoder.blocks.0.mlp.fc1.weight", 2)[0],
            "num_hidden_layers": source.layers("visual_encoder.blocks."),
            "num_attention_heads": vision_heads,
            "image_size": patch * round((positions - 1) ** 0.5),
            "patch_size": patch,
            "layer_norm_eps": 1e-6,
        },
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": text_width,
            "intermediate_size": source.shape("text_encoder.encoder.layer.0.intermediate.dense.weight", 2)[0],
            "num_hidden_layers": source.layers("text_encoder.encoder.layer."),
            "num_attention_heads": settings["num_attention_heads"],
            "max_position_embeddings": source.shape("text_encoder.embeddings.position_embeddings.weight", 2)[0],
            "hidden_act": settings.get("hidden_act", "gelu"),
            "layer_norm_eps": settings.get("layer_norm_eps", 1e-12),
            "is_decoder": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "sep_token_id": None,
        },
    )

    def name_in_blip(name: str) -> tuple[str, Take]:
        if name.startswith("mlp."):
            number, kind = name.removeprefix("mlp.").split(".")
            return f"mlp.layers.{linear[int(number)]}.{kind}", "whole"
        return _renamed(name, _BLIP), "whole"

    return source.load(ImageRewardModel, config, name_in_blip, dtype)


def hpsv3_model(path: str, base: str, dtype: torch.dtype) -> Any:
    """Load a checkpoint in HPSv3's format, with names of Qwen2-VL in transformers 4, as an HpsV3Model.

    The config.json of `base`, the folder or hub id of a Qwen2-VL, applies except for the size of the vocabulary. The
    head is in float32.
    """
    from transformers import Qwen2VLConfig

    from solrl_core.rewards.hpsv3_network import HpsV3Model

    source = _Source(path, f"HPSv3's own checkpoint, trained from {base}")
    config = Qwen2VLConfig.from_pretrained(base)
    config.text_config.vocab_size = source.shape("model.embed_tokens.weight", 2)[0]
    return source.load(HpsV3Model, config, lambda name: (_renamed(name, _QWEN), "whole"), dtype)


class _Source:
    def __init__(self, path: str, kind: str, prefix: str = "") -> None:
        self._path, self._kind = path, kind
        self._tensors = {name.removeprefix(prefix): tensor for name, tensor in read_checkpoint(path).items()}

    def _error(self, *problems: str) -> ValueError:
        return ValueError(f"{self._path!r} has {'; '.join(problems)}; expected {self._kind}")

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        if name not in self._tensors:
            raise self._error(f"no {name!r} among its {len(self._tensors)} tensors ({listed(self._tensors)})")
        shape = tuple(self._tensors[name].shape)
        if len(shape) != axes:
            raise self._error(f"{name!r} of shape {list(shape)}, expected {axes} axes")
        return shape

    def numbers(self, pattern: str) -> list[int]:
        numbers = sorted({int(match[1]) for name in self._tensors if (match := re.match(pattern, name))})
        if not numbers:
            raise self._error(f"no tensor named like {pattern!r} among its {len(self._tensors)}")
        return numbers

    def layers(self, prefix: str) -> int:
        return self.numbers(re.escape(prefix) + r"(\d+)\.")[-1] + 1

    def load(self, kind: Any, config: Any, named: Callable[[str], tuple[str, Take]], dtype: torch.dtype) -> Any:
        with torch.device("meta"):
            expected = {name: tuple(weight.shape) for name, weight in kind(config).state_dict().items()}
        origins = {name: named(name) for name in expected}
        sources = {source for source, _ in origins.values()}
        missing = sources - self._tensors.keys()
        unexpected = {name for name in self._tensors.keys() - sources if not _UNUSED.search(name)}
        shapes = {
            f"{source} {list(self._tensors[source].shape)} (expected {list(shape)})"
            for name, (source, take) in origins.items()
            if source not in missing
            and tuple(self._tensors[source].shape) != (shape := _source_shape(expected[name], take))
        }
        problems = {"missing": missing, "unexpected": unexpected, "wrong shapes": shapes}
        if any(problems.values()):
            raise self._error(*(f"{problem}: {listed(names)}" for problem, names in problems.items() if names))
        config.architectures = [kind.__name__]  # save_pretrained writes it too: digests must agree
        weights = {name: _part(self._tensors[source], take) for name, (source, take) in origins.items()}
        return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval().requires_grad_(False)


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in rules:
        # Match only at the start of a dotted component, so that "text." does not match in "context.".
        name = re.sub(rf"(^|(?<=\.)){re.escape(ours)}" if ours[0] != "." else re.escape(ours), theirs, name)
    return name


def open_clip_name(name: str) -> tuple[str, Take]:
    """The tensor of an open_clip checkpoint that has a weight of a CLIPModel, and the part of it that the weight is."""
    part = re.search(r"self_attn\.([qkv])_proj\.(weight|bias)$", name)
    if part:
        stem = _renamed(name[: part.start()], _OPEN_CLIP)
        takes: dict[str, Take] = {"q": 0, "k": 1, "v": 2}
        return f"{stem}attn.in_proj_{part[2]}", takes[part[1]]
    return _renamed(name, _OPEN_CLIP), "transposed" if name.endswith("_projection.weight") else "whole"


def _source_shape(shape: tuple[int, ...], take: Take) -> tuple[int, ...]:
    if take == "whole":
        return shape
    return shape[::-1] if take == "transposed" else (3 * shape[0], *shape[1:])


def _part(tensor: torch.Tensor, take: Take) -> torch.Tensor:
    if take == "whole":
        return tensor
    return tensor.T.contiguous() if take == "transposed" else tensor.chunk(3)[take].contiguous()


def _check_heads(width: int, heads: int, option: str) -> None:
    if heads < 1 or width % heads:
        raise ValueError(f"got {option} {heads} for a width of {width}; expected a divisor of the width")


def _read_med_config(path: str) -> Mapping[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"got no file {path!r}; expected BLIP's med_config.json next to the checkpoint, or its path as `med_config`"
        )
    try:
        settings = read_json(Path(path))
        int(settings["num_attention_heads"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path!r} is not BLIP's med_config.json with num_attention_heads: {error!r}") from error
    return dict(settings)
