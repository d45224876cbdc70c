"""Tiny configurations of models that have no miniature, and folders of them without weights, which stand in for one."""

import json
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    Flux2Transformer2DModel,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen3ForCausalLM, UMT5EncoderModel

_TEXT = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_TEXT |= {"num_key_value_heads": 1}
_BLOCKS = {"in_channels": 16, "num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
CHAT = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen3's chat template for one message."""
# Four levels, so that latents are 8 times smaller as in the released models.
VAE = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
VAE |= {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4}
VAE |= {"scaling_factor": 0.7, "shift_factor": 0.1, "use_quant_conv": False, "use_post_quant_conv": False}

Parts = dict[str, tuple[Any, dict[str, Any]]]
"""Part of a pipeline → (its class, values of its configuration)."""

TINY: dict[str, tuple[str, Any, Parts]] = {
    "qwen-image": (
        "QwenImagePipeline",
        # The released schedule.
        FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        {
            "transformer": (
                QwenImageTransformer2DModel,
                _BLOCKS | {"out_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": [4, 6, 6]},
            ),
            "vae": (
                AutoencoderKLQwenImage,
                {
                    **{"base_dim": 8, "z_dim": 4, "num_res_blocks": 1},
                    **{"latents_mean": [-0.7, 0.1, 0.9, -0.2], "latents_std": [2.8, 1.4, 2.3, 0.6]},
                },
            ),
            "text_encoder": (
                Qwen2_5_VLForConditionalGeneration,
                {
                    "text_config": _TEXT
                    | {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
                    "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
                },
            ),
        },
    ),
    "flux2-klein": (
        "Flux2KleinPipeline",
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        {
            "transformer": (
                Flux2Transformer2DModel,
                _BLOCKS
                | {"num_single_layers": 1, "joint_attention_dim": 3 * 32, "axes_dims_rope": [4, 4, 4, 4]}
                | {"guidance_embeds": False},
            ),
            "vae": (
                AutoencoderKLFlux2,
                {
                    "down_block_types": ["DownEncoderBlock2D"] * 4,
                    "up_block_types": ["UpDecoderBlock2D"] * 4,
                    "block_out_channels": [8, 8, 16, 16],
                    "layers_per_block": 1,
                    "latent_channels": 4,
                    "norm_num_groups": 4,
                },
            ),
            # The pipeline reads the 27th layer.
            "text_encoder": (Qwen3ForCausalLM, _TEXT | {"num_hidden_layers": 28, "head_dim": 16}),
        },
    ),
    "z-image": (
        "ZImagePipeline",
        FlowMatchEulerDiscreteScheduler(shift=6.0),
        {
            "transformer": (
                ZImageTransformer2DModel,
                {"in_channels": 4, "dim": 48, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 3, "n_kv_heads": 3}
                | {"cap_feat_dim": 64, "axes_dims": [4, 6, 6], "axes_lens": [128, 16, 16]},
            ),
            "text_encoder": (
                Qwen3ForCausalLM,
                {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
                | {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True, "vocab_size": 259},
            ),
            "vae": (AutoencoderKL, VAE),
        },
    ),
    "wan": (
        "WanPipeline",
        # The released schedule for 480p.
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        {
            "transformer": (
                WanTransformer3DModel,
                {"in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16}
                | {"num_attention_heads": 2, "text_dim": 64, "freq_dim": 32, "ffn_dim": 64},
            ),
            "vae": (
                AutoencoderKLWan,
                {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1}
                | {"latents_mean": [-0.7, 0.1, 0.9, -0.2], "latents_std": [2.8, 1.4, 2.3, 0.6]},
            ),
            "text_encoder": (
                UMT5EncoderModel,
                {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4},
            ),
        },
    ),
}
TINY["wan-14b"] = TINY["wan-81"] = TINY["wan"]
"""Model → (class of its pipeline, its scheduler, its parts)."""


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Qwen's tokenizer without merges: a token for each byte, and the special ones of a chat."""
    vocabulary = {letter: at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}
    special = ["<|im_start|>", "<|im_end|>"]
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=special, chat_template=CHAT)


def write_tiny(model: str, folder: Path) -> Path:
    """Write the tiny configurations of a model, a key of `TINY`, with a tokenizer of bytes; returns the folder."""
    pipeline, scheduler, parts = TINY[model]
    index = {"_class_name": pipeline}
    for name, (kind, values) in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        of_diffusers = hasattr(kind, "load_config")
        config = values | {"_class_name": kind.__name__}
        if not of_diffusers:
            config = kind.config_class(**values).to_dict() | {"architectures": [kind.__name__]}
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
        index[name] = ["diffusers" if of_diffusers else "transformers", kind.__name__]
    for name, part in (("scheduler", scheduler), ("tokenizer", qwen_tokenizer())):
        part.save_pretrained(folder / name)
        index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
    (folder / "model_index.json").write_text(json.dumps(index, indent=1))
    return folder
