"""Shares of rewards in the spread of their weighted sum."""

from typing import Any

import pytest
import torch
from solrl_trainer.records.reward_shares import log_shares, reward_shares

FLAT = torch.zeros(2, 4)
ROUNDED = torch.full((2, 4), 27.3).index_fill(1, torch.tensor(0), 27.300001)
APART = torch.tensor([[1.0] * 4, [9.0] * 4])
WIDE = torch.tensor([[0.0, 1, 2, 3], [6, 4, 2, 0]])
"""Its standard deviations are in the ratio 1 to 2."""


CASES: dict[str, Any] = {
    "one": ({"a": WIDE}, {"a": 1}, {"a": 1}),
    "a negative weight": ({"a": WIDE}, {"a": -3}, {"a": 1}),
    "by weight": ({"a": WIDE, "b": WIDE}, {"a": 1, "b": -0.25}, {"a": 0.8, "b": 0.2}),
    "by spread": ({"a": WIDE, "b": 4 * WIDE + 7}, {"a": 1, "b": 0.25}, {"a": 0.5, "b": 0.5}),
    "a constant": ({"a": WIDE, "b": FLAT}, {"a": 1, "b": 100}, {"a": 1, "b": 0}),
    "constants": ({"a": FLAT, "b": FLAT}, {"a": 1, "b": 1}, {"a": 0, "b": 0}),
    "one that is not trained": ({"a": WIDE, "logged": 9 * WIDE}, {"a": 1}, {"a": 1}),
    "rounding": ({"a": ROUNDED}, {"a": 1}, {"a": 0}),
    "of prompts": ({"a": APART, "b": WIDE}, {"a": 1, "b": 1}, {"a": 0, "b": 1}),
}


@pytest.mark.parametrize(("rewards", "weights", "shares"), CASES.values(), ids=CASES)
def test_shares(rewards: dict[str, torch.Tensor], weights: dict[str, float], shares: dict[str, float]) -> None:
    assert reward_shares(rewards, weights) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"a": 1.0}, []),
        ({"a": 0.0}, ["reward 'a' is equal for all images of each prompt"]),
        ({"a": 0.9, "b": 0.1}, ["shares of the spread of the weighted sum: a 90.0 %, b 10.0 %"]),
        ({"a": 0.963, "b": 0.037}, ["shares of the spread", "reward 'b' has less than 5 % of the spread"]),
        ({"a": 1.0, "b": 0.0}, ["shares of the spread", "reward 'b' is equal for all images of each prompt"]),
    ],
    ids=["one", "one that is constant", "two", "a small one", "a constant one"],
)
def test_small_shares_are_said(shares: dict[str, float], said: list[str], notes: list[str]) -> None:
    log_shares(shares)
    assert len(notes) == len(said)
    assert all(note.startswith(start) for note, start in zip(notes, said, strict=True))
