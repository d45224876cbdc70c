"""Encoded prompts: one cache per backbone, bounded by bytes, shared by its generators and by threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.families.backbone import Conditioning, PromptCache
from solrl_core.sampling.generator import Generator


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
