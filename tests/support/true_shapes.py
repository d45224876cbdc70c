"""Folders of configurations with the real models' shapes, taken from their published config.json files.

Values that are defaults of diffusers or transformers are not repeated; the transformers of SANA, Qwen-Image and Wan's
14B, and Gemma 2 2B, have no others. Tokenizers come from the miniatures, or have no merges; they only have to produce
as many tokens as the model takes.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from transformers import CLIPTextConfig, Gemma2Config, Qwen2_5_VLConfig, Qwen3Config, T5Config, UMT5Config

WIDE_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    **{"layers_per_block": 2, "latent_channels": 16, "sample_size": 1024},
    **{"use_quant_conv": False, "use_post_quant_conv": False},
}
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
CLIP_G = {
    **{"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20},
    **{"projection_dim": 1280, "hidden_act": "gelu"},
}
T5_XXL = {
    **{"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"},
    "tie_word_embeddings": False,
}
UMT5_XXL = T5_XXL | {"vocab_size": 256384}
QWEN_3_4B = {
    **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_key_value_heads": 8},
    **{"max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": True},
}
DC_AE_F32C32 = {
    "encoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
    "decoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
    "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "decoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "upsample_block_type": "interpolate",
    "downsample_block_type": "Conv",
    "scaling_factor": 0.41407,
}
SD35_LARGE = {
    **{"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pooled_projection_dim": 2048},
    **{"pos_embed_max_size": 192, "qk_norm": "rms_norm"},
}
SD35_MEDIUM = {
    **{"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pooled_projection_dim": 2048},
    **{"pos_embed_max_size": 384, "qk_norm": "rms_norm", "dual_attention_layers": list(range(13))},
}
WAN_1_3B = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
QWEN_2_5_VL_7B = {
    "text_config": {
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        **{"num_key_value_heads": 4, "vocab_size": 152064},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
}
FLUX2_KLEIN_4B = {
    **{"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 3 * 2560},
    "guidance_embeds": False,
}

Parts = dict[str, tuple[Any, dict[str, Any]]]
"""Part of a pipeline → (class of its configuration, values)."""

SD35: Parts = {
    "vae": (AutoencoderKL, WIDE_VAE | {"scaling_factor": 1.5305, "shift_factor": 0.0609}),
    "text_encoder": (CLIPTextConfig, CLIP_L | {"projection_dim": 768}),
    "text_encoder_2": (CLIPTextConfig, CLIP_G),
    "text_encoder_3": (T5Config, T5_XXL),
}
WAN: Parts = {
    "transformer": (WanTransformer3DModel, {}),
    "vae": (AutoencoderKLWan, {}),
    "text_encoder": (UMT5Config, UMT5_XXL),
}
MODELS: dict[str, Parts] = {
    "wan": WAN | {"transformer": (WanTransformer3DModel, WAN_1_3B)},
    "wan-81": WAN | {"transformer": (WanTransformer3DModel, WAN_1_3B)},
    "wan-14b": WAN,
    "flux": {
        "transformer": (FluxTransformer2DModel, {"guidance_embeds": True}),
        "vae": (AutoencoderKL, WIDE_VAE | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        "text_encoder": (CLIPTextConfig, CLIP_L),
        "text_encoder_2": (T5Config, T5_XXL),
    },
    "sd3": SD35 | {"transformer": (SD3Transformer2DModel, SD35_LARGE)},
    "sd3-medium": SD35 | {"transformer": (SD3Transformer2DModel, SD35_MEDIUM)},
    "qwen-image": {
        "transformer": (QwenImageTransformer2DModel, {}),
        "vae": (AutoencoderKLQwenImage, {}),
        "text_encoder": (Qwen2_5_VLConfig, QWEN_2_5_VL_7B),
    },
    "flux2-klein": {
        "transformer": (Flux2Transformer2DModel, FLUX2_KLEIN_4B),
        "vae": (AutoencoderKLFlux2, {}),
        "text_encoder": (Qwen3Config, QWEN_3_4B),
    },
    "sana": {
        "transformer": (SanaTransformer2DModel, {}),
        "vae": (AutoencoderDC, DC_AE_F32C32),
        "text_encoder": (Gemma2Config, {}),
    },
    "z-image": {
        "transformer": (ZImageTransformer2DModel, {"axes_lens": [1536, 512, 512]}),
        "vae": (AutoencoderKL, WIDE_VAE | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        "text_encoder": (Qwen3Config, QWEN_3_4B),
    },
}
FRAMES = {"wan-81": 81}
"""Model → frames of its clips, if they are not as many as by default."""


def write_skeleton(model: str, miniature: Path, folder: Path) -> Path:
    """Write a model folder with the true configurations of a model and no weights.

    Args:
        model: a key of `MODELS`.
        miniature: pipeline folder with the same classes, which provides index, scheduler and tokenizers.
        folder: folder to write; an existing one is replaced.
    """
    shutil.rmtree(folder, ignore_errors=True)
    unwanted = shutil.ignore_patterns("*.safetensors", "solrl.json", "*.md", "*.png")
    shutil.copytree(miniature, folder, ignore=unwanted)
    for part, (kind, values) in MODELS[model].items():
        path = folder / part / "config.json"
        old = json.loads(path.read_text())
        if hasattr(kind, "load_config"):
            config = {"_class_name": kind.__name__, **values}
        else:
            config = kind(**values).to_dict() | {"architectures": old["architectures"]}
        path.write_text(json.dumps(config, indent=1))
    if model in FRAMES:
        (folder / "solrl.json").write_text(json.dumps({"frames": FRAMES[model]}))
    return folder
