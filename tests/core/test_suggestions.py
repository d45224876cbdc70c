"""Suggestions for mistyped names."""

import pytest
from solrl_core.suggestions import near

NAMES = ["explore.prompts", "evaluate.prompts", "prompts", "optimizer.learning_rate", "optimizer.eps", "iterations"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("optimizer.lr", ["optimizer.learning_rate"]),
        ("explore.promts", ["explore.prompts"]),
        ("promts", ["prompts", "explore.prompts", "evaluate.prompts"]),
        ("learning-rate", ["optimizer.learning_rate"]),
        ("ITERATION", ["iterations"]),
        ("nonsense", []),
        ("", []),
    ],
)
def test_names_that_may_have_been_meant(name: str, meant: list[str]) -> None:
    assert near(name, NAMES) == meant
