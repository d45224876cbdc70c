"""Small BPE vocabularies of the shapes world, in the tokenizer classes of the real families."""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, GemmaTokenizer

from solrl_minis.world import all_combinations

VOCABULARY = 384
CLIP_TOKENS = 24


def corpus() -> Iterator[str]:
    """Every wording of every training combination."""
    for combination in all_combinations():
        if not combination.held_out:
            yield from combination.phrasings()


def _printable() -> list[str]:
    return [chr(i) for i in range(33, 127)]


def gemma_tokenizer() -> GemmaTokenizer:
    """A GemmaTokenizer whose words are mostly single tokens; other text falls back to characters."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    trained.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=[*_printable(), "▁"],
            show_progress=False,
        ),
    )
    model = _model(trained)
    return GemmaTokenizer(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], model_max_length=16)


def clip_tokenizer() -> CLIPTokenizer:
    """A CLIPTokenizer with the same kind of vocabulary."""
    start, end = "<|startoftext|>", "<|endoftext|>"
    trained = Tokenizer(models.BPE(unk_token=end, end_of_word_suffix="</w>"))
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trained.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[start, end],
            initial_alphabet=_printable(),
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    model = _model(trained)
    vocabulary = model["vocab"]
    for character in _printable():
        vocabulary.setdefault(character + "</w>", len(vocabulary))
    merges = [tuple(m) for m in model["merges"]]
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_TOKENS)


def _model(tokenizer: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model
