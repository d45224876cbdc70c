"""Folders of tiny pipelines with random weights, in the same classes as the released models."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
)
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.families import Backbone
from solrl_core.lora import target_modules
from solrl_minis.catalog import mini_sd3
from tests.core.lora_helpers import own_copy
from tests.support.tiny_skeletons import TINY, VAE, Parts, qwen_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2Tokenizer,
    T5EncoderModel,
    T5TokenizerFast,
)

HEIGHT, WIDTH = 64, 96
"""Default image size in pixels; latents are 8 times smaller."""
PROMPTS = ["a red circle", "two blue squares to the left of a green cross"]
T5_TOKENS = 20
QWEN_TOKENS = 80
FRAMES = 5
"""Frames of a clip, whose latents have two."""

_PIECES = ("<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁red", "▁blue", "▁circle", "▁squares")

_TEMPLATE = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:\nuser\nassistant\n"
)
# Qwen3's template for one message of a user, without thinking.
_CHAT = (
    "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@cache
def _clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(mini_sd3() / "tokenizer", model_max_length=77)


def t5_tokenizer() -> T5TokenizerFast:
    vocabulary = [(piece, -float(len(_PIECES) - len(piece))) for piece in _PIECES]
    return T5TokenizerFast(vocab=vocabulary, extra_ids=0)


@cache
def _byte_tokenizer() -> Qwen2Tokenizer:
    """A byte-level tokenizer that has Qwen-Image's template in as many tokens as the released one."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trained.train_from_iterator([_TEMPLATE, *PROMPTS], trainer)
    model = json.loads(trained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=_CHAT,
    )


_T5 = {"vocab_size": len(_PIECES), "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}
_T5 |= {"is_gated_act": True}
_HEADS = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 64}


@cache
def _models() -> dict[str, tuple[str, Any, Parts]]:
    """More models in the form of `TINY`; random numbers are drawn in the order of the parts."""
    tokenizer = _clip_tokenizer()
    clip = {"hidden_size": 32, "intermediate_size": 64, "projection_dim": 32, "num_hidden_layers": 3}
    clip |= {"num_attention_heads": 2, "max_position_embeddings": 77, "vocab_size": len(tokenizer)}
    clip |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vae = (AutoencoderKL, VAE)
    sd3 = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "caption_projection_dim": 32}
    sd3 |= {"pooled_projection_dim": 64, "pos_embed_max_size": 16, "dual_attention_layers": (), "qk_norm": None}
    flux = {"in_channels": 16, "num_layers": 2, "num_single_layers": 3, "pooled_projection_dim": 32}
    return TINY | {
        "sd3": (
            "StableDiffusion3Pipeline",
            None,
            {
                "transformer": (SD3Transformer2DModel, _HEADS | sd3),
                "vae": vae,
                "text_encoder": (CLIPTextModelWithProjection, clip),
                "text_encoder_2": (CLIPTextModelWithProjection, clip),
                "text_encoder_3": (T5EncoderModel, _T5),
            },
        ),
        "flux": (
            "FluxPipeline",
            None,
            {
                "transformer": (FluxTransformer2DModel, _HEADS | flux | {"axes_dims_rope": (4, 6, 6)}),
                "vae": vae,
                "text_encoder": (CLIPTextModel, clip),
                "text_encoder_2": (T5EncoderModel, _T5),
            },
        ),
    }


def save(pipeline: DiffusionPipeline, folder: Path, tokens: int = T5_TOKENS, **options: int) -> Path:
    """Write a pipeline with weights that BF16 holds exactly, so that every loader gets the same values."""
    for name, part in pipeline.components.items():
        if not isinstance(part, torch.nn.Module):
            continue
        for tensor in part.state_dict().values():
            if not tensor.is_floating_point():
                continue
            # Biases and modulations start at or near zero, where a mistake in them would not show.
            if name == "transformer":
                tensor.add_(torch.randn_like(tensor) * 0.05)
            tensor.copy_(tensor.bfloat16())
    pipeline.save_pretrained(folder)
    settings = {"height": HEIGHT, "width": WIDTH, "max_sequence_length": tokens, "keep_max_dim": 0, **options}
    (folder / "solrl.json").write_text(json.dumps(settings))
    return folder


def write_sd3(folder: Path, *, sd35: bool, dynamic: bool = False) -> Path:
    """A tiny Stable Diffusion 3; `sd35` has normalised queries and keys and dual attention, as 3.5 Medium."""
    changes = {"transformer": {"dual_attention_layers": (0,), "qk_norm": "rms_norm"} if sd35 else {}}
    clip = _clip_tokenizer()
    tokenizers = {"tokenizer": clip, "tokenizer_2": clip, "tokenizer_3": t5_tokenizer()}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic)
    return save(_made("sd3", changes, scheduler=scheduler, **tokenizers), folder)


def write_flux(folder: Path, *, dev: bool) -> Path:
    """A tiny FLUX.1; `dev` is guidance-distilled with a dynamic shift, the other, like schnell, neither."""
    changes = {"transformer": {"guidance_embeds": dev}}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0 if dev else 1.0, use_dynamic_shifting=dev)
    tokenizers = {"tokenizer": _clip_tokenizer(), "tokenizer_2": t5_tokenizer()}
    return save(_made("flux", changes, scheduler=scheduler, **tokenizers), folder)


def write_z_image(folder: Path, *, dynamic: bool = False) -> Path:
    """A tiny Z-Image, whose text encoder is stored as a whole language model, as in the published folder."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=6.0, use_dynamic_shifting=dynamic)
    pipeline = _made("z-image", {}, scheduler=scheduler, tokenizer=qwen_tokenizer())
    language = pipeline.text_encoder
    pipeline.register_modules(text_encoder=language.model)
    save(pipeline, folder, QWEN_TOKENS)
    language.save_pretrained(folder / "text_encoder")
    return folder


def write_wan(folder: Path, *, residual: bool = False) -> Path:
    """A tiny Wan2.1; `residual` has the autoencoder and the times of each token of Wan2.2's 5B."""
    own = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    changes = {"transformer": {"num_layers": 2}, "vae": own if residual else {}}
    return save(_made("wan", changes, tokenizer=t5_tokenizer(), expand_timesteps=residual), folder, frames=FRAMES)


def write_qwen_image(folder: Path) -> Path:
    """A tiny Qwen-Image."""
    return save(_made("qwen-image", {"transformer": {"num_layers": 2}}, tokenizer=_byte_tokenizer()), folder)


def write_flux2_klein(folder: Path, *, distilled: bool = False) -> Path:
    """A tiny FLUX.2 [klein]; `distilled` has no classifier-free guidance."""
    blocks = {"num_layers": 2, "num_single_layers": 2}
    pipeline = _made("flux2-klein", {"transformer": blocks}, tokenizer=_byte_tokenizer(), is_distilled=distilled)
    pipeline.vae.bn.running_mean.normal_()
    pipeline.vae.bn.running_var.uniform_(0.5, 2)
    return save(pipeline, folder)


def _made(model: str, changes: dict[str, dict[str, Any]], **others: Any) -> Any:
    """The pipeline of a model with random weights, `changes` of its parts' configurations, and `others` arguments."""
    torch.manual_seed(0)
    pipeline, scheduler, parts = _models()[model]
    made = {"scheduler": scheduler}
    for name, (kind, values) in parts.items():
        values = values | changes.get(name, {})
        made[name] = kind(**values) if hasattr(kind, "load_config") else kind(kind.config_class(**values))
    return getattr(diffusers, pipeline)(**made | others)


def on_a_grid(backbone: Backbone) -> tuple[Backbone, Adapter]:
    """A base and an adapter on multiples of 1/32 so small that their sum needs no rounding to BF16."""
    mine = own_copy(backbone)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, module in target_modules(mine.transformer, mine.lora_targets).items():
        module.weight.data.copy_((module.weight * 32).round().clamp(-32, 32) / 32)
        tensors[lora_a_key(name)] = torch.randint(-1, 2, (2, module.in_features), generator=generator) / 8
        tensors[lora_b_key(name)] = torch.randint(-1, 2, (module.out_features, 2), generator=generator) / 8
    return mine, Adapter(rank=2, alpha=4.0, tensors=tensors)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest."""
    assert one.shape == other.shape
    return float((one - other).abs().max())
