"""Tokens that no text encoder reads: exactly where they begin, two prompts become one."""

from dataclasses import replace

import pytest
import torch
from solrl_core.families import Backbone, load_backbone

WORDS = ("red", "blue", "circle", "square", "two", "small", "green", "cross")


@pytest.fixture(scope="module", params=["mini-sana", "mini-sana with an instruction", "mini-sd3", "mini-flux"])
def backbone(request: pytest.FixtureRequest) -> Backbone:
    name, _, instructed = request.param.partition(" with ")
    loaded = load_backbone(name)
    if instructed:
        loaded.options = replace(loaded.options, complex_human_instruction=["describe well", "user prompt: "])
    return loaded


def test_prompts_that_differ_in_unread_tokens_alone_are_one(backbone: Backbone) -> None:
    seen = []
    for length in range(1, 24):
        start = " ".join(WORDS[i % len(WORDS)] for i in range(length))
        first, second = f"{start} circle", f"{start} square"
        one, other = backbone.encode([first]), backbone.encode([second])
        same = all(torch.equal(one[name], other[name]) for name in one)
        unread = backbone.truncated_tokens([first, second])
        assert (min(unread) > 0) == same, (length, unread)
        seen.append(unread[0])
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert 0 < seen[-1] < 24
