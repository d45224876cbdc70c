"""HPSv3's scores by its own package, of a reduced model with random weights."""

import importlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
import transformers.trainer  # before the modules that are not installed
from PIL import Image

from reward_parity.weights import randomise, save

WIDTH, LAYERS = 16, 2
SQUARE = 2
"""Index of the image that is also scored enlarged."""
TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in "
    "content or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}"
    "Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2-VL's, without its part for videos."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
REWARD = "<|Reward|>"
NOT_INSTALLED = (
    *("trl", "peft", "datasets", "pandas", "matplotlib", "matplotlib.pyplot", "matplotlib.patches", "fire"),
    *("omegaconf", "torch.utils.tensorboard"),
)
"""Modules that the package imports for its training alone."""


class Absent(types.ModuleType):
    """A module whose names are all `object`."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def hpsv3_scores(images: list[np.ndarray], prompts: tuple[str, ...], folder: Path) -> dict[str, np.ndarray]:
    """Means [images, prompts] as the package's `reward` gives them, and those [prompts] of an enlarged image.

    Writes the model and its tokenizer to a folder.
    """
    for name in NOT_INSTALLED:
        sys.modules[name] = Absent(name)
    inference = importlib.import_module("hpsv3.inference")
    network = importlib.import_module("hpsv3.model.qwen2vl_trainer")
    from transformers import Qwen2VLConfig, Qwen2VLImageProcessor, Qwen2VLProcessor

    question = importlib.import_module("hpsv3.dataset.data_collator_qwen").INSTRUCTION
    tokenizer = write_tokenizer(folder / "tokenizer", [*prompts, question])
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    vision = {"depth": LAYERS, "embed_dim": 8, "hidden_size": WIDTH, "mlp_ratio": 2, "num_heads": 2}
    config = Qwen2VLConfig(
        vocab_size=len(tokenizer) + 8,  # as Qwen's, larger than the tokenizer
        num_key_value_heads=1,
        max_window_layers=LAYERS,
        rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
        vision_config=vision,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        image_token_id=image_token,
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        attn_implementation="sdpa",
        **sizes,
    )
    config.save_pretrained(folder / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": [REWARD]})
    special = tokenizer.convert_tokens_to_ids([REWARD])
    model = network.Qwen2VLRewardModelBT(
        config, output_dim=2, reward_token="special", special_token_ids=special, rm_head_type="ranknet"
    )
    model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    randomise(model, 9)  # with this seed, no score is near zero
    save(model, folder / "checkpoint.pt", wrapped=False)

    theirs = object.__new__(inference.HPSv3RewardInferencer)
    theirs.model, theirs.device, theirs.use_special_tokens = model.eval(), "cpu", True
    pictures = Qwen2VLImageProcessor()
    theirs.processor = Qwen2VLProcessor(image_processor=pictures, tokenizer=tokenizer, chat_template=TEMPLATE)
    rows = []
    with torch.no_grad():
        for image in images:
            found = theirs.reward([Image.fromarray(image)] * len(prompts), list(prompts))
            rows.append(found[:, 0].numpy())
        large = Image.fromarray(enlarged(images[SQUARE]))
        found = theirs.reward([large] * len(prompts), list(prompts))[:, 0]
    return {"hpsv3": np.stack(rows), "hpsv3_large": found.numpy()}


def enlarged(image: np.ndarray) -> np.ndarray:
    """An image [H, W, 3] with 14 times the sides: larger than HPSv3's, to which it is reduced."""
    return image.repeat(14, 0).repeat(14, 1)


def write_tokenizer(folder: Path, texts: list[str]) -> "transformers.PreTrainedTokenizerFast":
    """Write a tokenizer as Qwen2's, with few merges; returns it."""
    from transformers import Qwen2TokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import bytes_to_unicode

    folder.mkdir(parents=True, exist_ok=True)
    letters = list(bytes_to_unicode().values())
    merges: dict[str, None] = {}
    for word in sorted({word for text in texts for word in text.split() if word.isascii() and word.isalpha()}):
        pieces = ["Ġ", *word]
        for at in range(1, len(pieces)):
            merges[f"{''.join(pieces[:at])} {pieces[at]}"] = None
    kept = sorted(merges, key=len)[:150]
    vocabulary = {piece: at for at, piece in enumerate([*letters, *(merge.replace(" ", "") for merge in kept)])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *kept]) + "\n")
    tokenizer = Qwen2TokenizerFast(
        vocab_file=str(folder / "vocab.json"),
        merges_file=str(folder / "merges.txt"),
        additional_special_tokens=list(SPECIAL[1:]),
        padding_side="right",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
