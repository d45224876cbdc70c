"""Suggestions for mistyped names."""

import pytest
from solrl_core.suggestions import check_command, did_you_mean, near

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


def test_no_more_than_a_few_are_suggested() -> None:
    assert len(near("a1", [f"a{i}" for i in range(9)])) <= 3
    assert near("x", []) == []


def test_the_question() -> None:
    assert did_you_mean("optimizer.lr", NAMES) == " (did you mean 'optimizer.learning_rate'?)"
    assert did_you_mean("nonsense", NAMES) == ""


@pytest.mark.parametrize("words", [[], ["--help"], ["run"], ["run", "more"]])
def test_a_command_that_is_known_passes(words: list[str]) -> None:
    check_command("program", words, ["run", "runs"])


def test_an_unknown_command_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check_command("program", ["runn"], ["run", "report"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "program: got command 'runn' (did you mean 'run'?); expected one of run, report\n"
