"""Folders of tiny pipelines with Qwen's text encoders and random weights, in the classes of the released models."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from support.tiny_skeletons import TINY
from tiny_pipelines import PROMPTS, save
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

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
def _tokenizer() -> Qwen2Tokenizer:
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


def write_qwen_image(folder: Path) -> Path:
    """A tiny Qwen-Image."""
    return _write("qwen-image", folder, {})


def write_flux2_klein(folder: Path, *, distilled: bool = False) -> Path:
    """A tiny FLUX.2 [klein]; `distilled` has no classifier-free guidance."""
    return _write("flux2-klein", folder, {"num_single_layers": 2}, is_distilled=distilled)


def _write(model: str, folder: Path, blocks: dict[str, int], **settings: Any) -> Path:
    torch.manual_seed(0)
    pipeline, scheduler, parts = TINY[model]
    made: dict[str, Any] = {}
    for name, (kind, values) in parts.items():
        if name == "transformer":
            values = values | {"num_layers": 2} | blocks
        made[name] = kind(**values) if hasattr(kind, "load_config") else kind(kind.config_class(**values))
    if "bn" in made["vae"]._modules:
        made["vae"].bn.running_mean.normal_()
        made["vae"].bn.running_var.uniform_(0.5, 2)
    return save(getattr(diffusers, pipeline)(scheduler=scheduler, tokenizer=_tokenizer(), **made, **settings), folder)
