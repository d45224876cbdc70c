"""Layers that see only the prompt are computed once for a batch, with the same bits."""

from collections import Counter

import pytest
import torch
from lora_helpers import random_adapter
from solrl_core.families import Backbone
from solrl_core.sampling import text_projection_cache
from solrl_core.sampling.generator import Generator
from torch import nn

PROMPTS = ("a red circle", "two blue squares")
STEPS = 3


@pytest.fixture(scope="module")
def generator(backbone: Backbone) -> Generator:
    return Generator(backbone, "nvfp4")


def latents(generator: Generator) -> torch.Tensor:
    texts = [text for text in PROMPTS for _ in range(4)]
    return generator.generate(texts, list(range(8)), steps=STEPS, decode=False).latents


def test_latents_are_those_of_layers_computed_in_every_step(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
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
