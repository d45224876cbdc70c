"""Limits of a rollout request: metadata stays small, and each seed of a group draws noise of its own."""

from typing import Any

import pytest
from pydantic import ValidationError
from solrl_proto.rollouts import MAX_METADATA_BYTES, MAX_METADATA_DEPTH, Candidates, PromptItem


def nested(depth: int) -> dict[str, Any]:
    """An object that holds `depth` levels, itself counted."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": [value]} if depth % 2 else {"a": value}
    return value


def test_metadata_may_be_as_large_as_the_limit() -> None:
    frame = len('{"a": ""}')
    PromptItem(id="p", text="a", metadata={"a": "x" * (MAX_METADATA_BYTES - frame)})
    with pytest.raises(ValidationError, match=f"{MAX_METADATA_BYTES + 1} bytes as JSON; expected at most"):
        PromptItem(id="p", text="a", metadata={"a": "x" * (MAX_METADATA_BYTES - frame + 1)})


def test_metadata_is_counted_as_bytes_on_the_wire() -> None:
    with pytest.raises(ValidationError, match="bytes as JSON"):
        PromptItem(id="p", text="a", metadata={"a": "é" * (MAX_METADATA_BYTES // 2)})


def test_metadata_may_be_nested_as_deep_as_the_limit() -> None:
    PromptItem(id="p", text="a", metadata=nested(MAX_METADATA_DEPTH))
    with pytest.raises(ValidationError, match="nested more than"):
        PromptItem(id="p", text="a", metadata=nested(MAX_METADATA_DEPTH + 2))


def test_deep_metadata_is_refused_without_recursion() -> None:
    with pytest.raises(ValidationError, match="nested more than"):
        PromptItem(id="p", text="a", metadata=nested(100_000))


@pytest.mark.parametrize("offset", [2**32, 2**40, 2**52])
def test_seeds_that_draw_the_same_noise_are_refused_within_a_group(offset: int) -> None:
    with pytest.raises(ValidationError, match=r"equal modulo 2\*\*32"):
        Candidates(seeds=((5, 5 + offset),))


def test_groups_may_share_noise() -> None:
    assert Candidates(seeds=((5, 6), (5 + 2**32, 7))).seeds is not None
