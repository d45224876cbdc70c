"""`dpm2` on every family equals an independent DPM-Solver++(2M) on the family's own sigmas."""

import math
from itertools import pairwise

import pytest
import torch
from lora_helpers import own_copy
from solrl_core.families import Backbone
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.noise import initial_noise
from tiny_models import ONE_EACH, Tiny
from tiny_pipelines import PROMPTS, difference

SEEDS = [3, 14]


@pytest.fixture
def model(tiny: Tiny) -> Backbone:
    """A small model of each family with random weights."""
    if tiny.name != "sana/mini":
        return tiny.backbone
    mine = own_copy(tiny.backbone)
    generator = torch.Generator().manual_seed(0)
    for tensor in mine.transformer.parameters():
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return mine


@torch.no_grad()
def by_hand(model: Backbone, steps: int) -> torch.Tensor:
    """Lu et al., arXiv 2211.01095, algorithm 2 with alpha = 1 − σ; first and last step of first order."""
    sigmas, rows = model.sigmas(steps), model.encode(PROMPTS)
    x = initial_noise(SEEDS, model.latent_shape)
    before: tuple[float, torch.Tensor] | None = None
    for step, (now, then) in enumerate(pairwise(sigmas)):
        clean = x - now * model.velocity(model.transformer, x, torch.full((len(SEEDS),), now), rows)
        if step == steps - 1:
            return clean
        here = math.log(1 - now) - math.log(now) if now < 1 else None
        there = math.log(1 - then) - math.log(then)
        towards = clean
        if here is not None and before is not None and math.isfinite(before[0]):
            ratio = (here - before[0]) / (there - here)
            towards = (1 + 1 / (2 * ratio)) * clean - 1 / (2 * ratio) * before[1]
        shrink = 0.0 if here is None else math.exp(here - there)
        x = then / now * x + (1 - then) * (1 - shrink) * towards
        before = (-math.inf if here is None else here, clean)
    raise AssertionError


@pytest.mark.parametrize("tiny", ONE_EACH, indirect=True)
def test_dpm2_equals_2m_on_the_familys_sigmas(model: Backbone) -> None:
    generator = Generator(model, "bf16")
    ours = generator.generate(PROMPTS, SEEDS, steps=6, solver="dpm2")
    theirs = by_hand(model, 6)
    assert difference(ours.latents, theirs) <= 1e-5 * max(1.0, float(theirs.abs().max()))
    assert difference(ours.images, model.decode(theirs)) <= 1e-5
    euler = generator.generate(PROMPTS, SEEDS, steps=6).latents
    assert difference(ours.latents, euler) > 1e-3
