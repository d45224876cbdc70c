"""The text world: words, their images, what reads them, and a model that takes characters one by one."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from minis_recipe import reading
from minis_recipe.autoencoder import build_kl
from minis_recipe.family import TEXT_TOKENS, wrap
from minis_recipe.sd3_text import SD3_TEXT
from minis_recipe.words import CHARACTERS, INKS, LENGTHS, Word, WordSource, sample_words
from solrl_core.rewards.images import as_bytes
from solrl_core.rewards.ocr import wanted_text
from solrl_core.tesseract import read_by_tesseract

needs_engine = pytest.mark.skipif(find_spec("rapidocr") is None, reason="the extra `ocr` is not installed")
needs_tesseract = pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")


def test_training_data_holds_no_held_out_word() -> None:
    source = WordSource(0)
    drawn = source.draw(500)
    changed = [source.change(word) for word in drawn]
    assert not any(word.held_out for word in [*drawn, *changed])
    assert all(word.held_out for word in WordSource(0, held_out=True).draw(100))
    assert {word.ink for word in drawn} == set(INKS)
    assert {len(word.text) for word in drawn} == set(LENGTHS)
    assert {one for word in drawn for one in word.text} == set(CHARACTERS)
    before, after = ("".join(word.text for word in words) for words in (drawn, changed))
    assert 0.38 < sum(one != other for one, other in zip(before, after, strict=True)) / len(before) < 0.5
    for word, other in zip(drawn, changed, strict=True):
        assert (len(word.text), word.ink) == (len(other.text), other.ink)


def test_sampled_words_differ_and_are_the_same_each_time() -> None:
    words = sample_words(True, 200, seed=0)
    assert len({word.text for word in words}) == 200
    assert words == sample_words(True, 200, seed=0)
    assert words != sample_words(True, 200, seed=1)


def test_the_reward_asks_for_the_word() -> None:
    word = Word("K7", "red")
    assert word.prompt == '"K7" in red'
    assert wanted_text(word.prompt, {}) == wanted_text("", word.metadata) == "K7"


def drawn(count: int) -> tuple[list[Word], torch.Tensor]:
    words = sample_words(True, count, seed=0)
    return words, WordSource(0).images(words, "cpu")


def test_words_are_drawn_in_their_colour_where_they_are_read() -> None:
    words, images = drawn(60)
    assert images.shape == (60, 3, 32, 64)
    assert 0 <= images.min() < images.max() <= 1
    assert reading.nearest(images, words) == [word.text for word in words]
    # Read as another word of that length, an image is still read as what it shows.
    others = [Word("A" * len(word.text), word.ink) for word in words]
    assert reading.nearest(images, others) == [word.text for word in words]
    strongest = torch.tensor([INKS.index(word.ink) for word in words if word.ink != "purple"])
    shown = (1 - images.flatten(2)).sum(2).argmin(1)[[word.ink != "purple" for word in words]]
    assert torch.equal(strongest, shown)


def test_an_exact_match_ignores_case_and_white_space() -> None:
    found = reading.exact(["K7", "k7 ", "K 7", "K77", ""], ["K7"] * 5)
    assert found.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("read", "least"),
    [
        pytest.param(reading.by_rapidocr, 0.95, marks=needs_engine),
        pytest.param(read_by_tesseract, 0.9, marks=needs_tesseract),
    ],
)
def test_engines_read_drawn_words(read: Callable[[np.ndarray], list[str]], least: float) -> None:
    words, images = drawn(60)
    assert reading.exact(read(as_bytes(images).numpy()), [word.text for word in words]).mean() >= least


def test_the_model_takes_characters_one_by_one() -> None:
    torch.manual_seed(0)
    pipeline = SD3_TEXT.build(build_kl())
    texts = ['"K7QX" in purple', '"REED" in red', '"K7QR" in purple']
    for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_3):
        for text, word in zip(texts, ("K7QX", "REED", "K7QR"), strict=True):
            pieces = [piece.removesuffix("</w>").upper() for piece in tokenizer.tokenize(text)]
            start = pieces.index('"') + 1
            assert pieces[start : start + 4] == list(word)
            assert len(tokenizer(text).input_ids) <= TEXT_TOKENS
    backbone = wrap(SD3_TEXT, pipeline)
    assert backbone.latent_shape == (4, 8, 16)
    with torch.no_grad():
        mine = SD3_TEXT.encode(pipeline, SD3_TEXT.tokenize(pipeline, texts))
    theirs = backbone.encode(texts)
    for key, value in theirs.items():
        assert torch.allclose(mine[key].float(), value.float(), atol=1e-5), key
    assert (mine["states"][0] - mine["states"][2]).abs().max() > 1
    assert backbone.decode(torch.zeros(1, *backbone.latent_shape)).shape == (1, 3, 32, 64)
