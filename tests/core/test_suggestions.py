"""Suggestions for mistyped names."""

import pytest
from solrl_core.suggestions import check_command, near

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


def test_an_unknown_command_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check_command("program", ["runn"], ["run", "report"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "program: got command 'runn' (did you mean 'run'?); expected one of run, report\n"
