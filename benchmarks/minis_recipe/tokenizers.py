"""Tokenizers with small vocabularies for the worlds, in the classes of the real families."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertTokenizer, CLIPTokenizer, GemmaTokenizer, T5TokenizerFast

from minis_recipe.world import all_combinations

VOCABULARY = 384
CLIP_TOKENS = 24


def corpus() -> Iterator[str]:
    """All wordings of all training combinations."""
    for combination in all_combinations():
        if not combination.held_out:
            yield from combination.phrasings()


def _printable() -> list[str]:
    return [chr(i) for i in range(33, 127)]


def _words(texts: Iterable[str]) -> list[str]:
    return sorted({word for text in texts for word in text.split() if len(word) > 1})


def gemma_tokenizer() -> GemmaTokenizer:
    """Build a GemmaTokenizer. Most words of the world are single tokens; other text falls back to characters."""
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


def clip_tokenizer(tokens: int = CLIP_TOKENS) -> CLIPTokenizer:
    """Build a CLIPTokenizer with the same kind of vocabulary, for texts of so many tokens."""
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
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=tokens)


def clip_character_tokenizer(tokens: int) -> CLIPTokenizer:
    """Build a CLIPTokenizer that reads one character at a time."""
    pieces = ["<|startoftext|>", "<|endoftext|>", *_printable(), *(f"{character}</w>" for character in _printable())]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=tokens)


def t5_tokenizer(tokens: int, texts: Iterable[str] | None = None) -> T5TokenizerFast:
    """Build a T5Tokenizer. Each word of `texts`, or of the corpus, is a token; other text falls back to characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -10.0)]
    pieces += [(character, -10.0) for character in _printable()]
    pieces += [(f"▁{word}", -1.0) for word in (*_words(corpus() if texts is None else texts), "a")]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=tokens)


def bert_tokenizer(tokens: int) -> BertTokenizer:
    """Build a BertTokenizer with the words of the world, single characters, and BLIP's two special tokens."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *_printable(), *(f"##{character}" for character in _printable()), *_words(corpus())]
    tokenizer = BertTokenizer(
        vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))}, model_max_length=tokens
    )
    tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
    return tokenizer


def _model(tokenizer: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model
