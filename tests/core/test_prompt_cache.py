"""Encoded prompts: one cache per backbone, bounded by bytes, shared by its generators and by threads."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lora_helpers import random_adapter
from solrl_core.families import Backbone
from solrl_core.families.backbone import Conditioning
from solrl_core.sampling import text_projection_cache
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.prompt_cache import PromptCache
from torch import nn


def encoded(size: int) -> Conditioning:
    return {"states": torch.zeros(size, dtype=torch.uint8), "mask": torch.zeros(size, dtype=torch.uint8)}


def test_a_prompt_is_encoded_once_for_each_guidance(backbone: Backbone) -> None:
    first = backbone.conditioning("a red circle")
    assert backbone.conditioning("a red circle") is first
    assert backbone.conditioning("a red circle", 0.5) is first
    assert backbone.conditioning("a blue circle") is not first
    guided = backbone.conditioning("a red circle", 2.5)
    assert guided.keys() == {"states", "mask", "negative_states", "negative_mask"}
    assert backbone.conditioning("a red circle") is first
    assert torch.equal(first["states"], backbone.encode(["a red circle"])["states"])
    assert not torch.equal(first["states"], backbone.conditioning("a blue circle")["states"])


def test_generators_of_a_backbone_share_their_prompts(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("bf16", "nvfp4"):
        Generator(backbone, precision).generate("a shared circle", [1, 2], steps=1, decode=False)
        monkeypatch.setattr(backbone, "encode", None)  # from now on there is nothing to encode


def test_encodings_can_be_trained_on_wherever_they_were_made(backbone: Backbone) -> None:
    with torch.inference_mode():
        states = backbone.conditioning("encoded while generating")["states"]
    assert not states.is_inference()
    assert not states.requires_grad


def test_the_least_recently_used_go_and_a_failed_encoding_is_tried_again() -> None:
    cache = PromptCache(100)
    a, b = cache.get("a", lambda: encoded(20)), cache.get("b", lambda: encoded(20))
    assert cache.get("a", lambda: encoded(1)) is a
    cache.get("c", lambda: encoded(20))
    assert cache.get("a", lambda: encoded(1)) is a
    assert cache.get("b", lambda: encoded(20)) is not b

    def fail() -> Conditioning:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        cache.get("d", fail)
    assert cache.get("d", lambda: encoded(3)).keys() == {"states", "mask"}


def test_threads_encode_a_prompt_once() -> None:
    cache, calls = PromptCache(10_000), []

    def encode() -> Conditioning:
        calls.append(None)
        return encoded(5)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda turn: cache.get(turn % 4, encode), range(400)))
    assert len(calls) == 4
    assert all(found[turn] is found[turn % 4] for turn in range(400))


PROMPTS = ("a red circle", "two blue squares")

STEPS = 3


@pytest.fixture(scope="module")
def generator(backbone: Backbone) -> Generator:
    return Generator(backbone, "nvfp4")


def latents(generator: Generator) -> torch.Tensor:
    texts = [text for text in PROMPTS for _ in range(4)]
    return generator.generate(texts, list(range(8)), steps=STEPS, decode=False).latents


def test_latents_are_those_of_layers_computed_each_step(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    once = latents(generator)
    monkeypatch.setattr(text_projection_cache, "_is_same", lambda known, x: False)
    assert torch.equal(once, latents(generator))


def test_an_adapter_is_used_at_once(backbone: Backbone, generator: Generator) -> None:
    text = backbone.conditioning(PROMPTS[0])
    x, sigma = torch.zeros(1, *backbone.latent_shape), torch.ones(1)

    @torch.inference_mode()
    def velocity(generator: Generator) -> torch.Tensor:
        return backbone.velocity(generator.transformer, x, sigma, text)

    velocity(generator)
    adapter = random_adapter(backbone, seed=1)
    generator.set_adapter(adapter)
    fresh = Generator(backbone, "nvfp4")
    fresh.set_adapter(adapter)
    assert torch.equal(velocity(generator), velocity(fresh))
    generator.set_adapter(None)


class Counted(nn.Linear):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: Counter[str] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["forward"] += 1
        return super().forward(x)


def test_the_same_tensor_is_computed_once_and_an_equal_one_again() -> None:
    model = nn.ModuleDict({"text": Counted(), "image": Counted()})
    text, image = (model.get_submodule(name) for name in ("text", "image"))
    remembered = text_projection_cache.TextProjectionCache(model, "text")
    x = torch.ones(3, 2)
    with torch.no_grad():
        assert text(x) is text(x.view(3, 2))
        image(x), image(x)
        text(x.clone())
        assert (text.calls["forward"], image.calls["forward"]) == (2, 2)
        text(x)
        remembered.forget()
        text(x)
    assert text.calls["forward"] == 4
    assert text(x).requires_grad, "with gradient, it is computed anew"
