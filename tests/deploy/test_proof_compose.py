"""docker-compose.yml is read like a container engine reads it."""

from pathlib import Path

import pytest
from proof.compose import interpolate, load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$$(cat x) $$A", "$(cat x) $A"),
        ("${A}/$A/${A-x}/${A:-x}", "word/word/word/word"),
        ("<${EMPTY-x}> <${EMPTY:-x}> <${NONE-x}> <${NONE:-x}> <${NONE}>", "<> <x> <x> <x> <>"),
        ("${NONE-https://a.b/c}", "https://a.b/c"),
        ("${NONE:-${A}}", "word"),
    ],
)
def test_variables(text: str, expected: str) -> None:
    assert interpolate(text, {"A": "word", "EMPTY": ""}) == expected


def test_a_variable_without_a_value_is_passed_on_if_it_is_set() -> None:
    file = ROOT / "docker-compose.yml"
    assert "SOLRL_TOKEN_FILE" not in load(file, {})["services"]["rollout"]["environment"]
    given = load(file, {"SOLRL_TOKEN_FILE": "/tokens/a"})["services"]["rollout"]["environment"]
    assert given["SOLRL_TOKEN_FILE"] == "/tokens/a"
