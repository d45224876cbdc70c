"""Texts from outside: problems, logs and errors never show their control characters; problems as text."""

import json
import logging
from pathlib import Path

import pytest
from solrl_proto.printable import PrintableFormatter, error_text, print_error, printable, printable_value
from solrl_proto.problems import Problem, ProblemError, ProblemKind

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\r\n\x9b31m\ud800 <b>[red]"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\u202e\r\n\x9b31m\ud800 <b>[red]"


def test_control_and_format_characters_are_escaped_also_in_values() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("grün, 開く, 2 × 3") == "grün, 開く, 2 × 3"
    assert printable(printable("long " * 1000)) == printable("long " * 1000)
    assert printable_value({EVIL: [EVIL, 3, None]}) == {SHOWN: [SHOWN, 3, None]}
    assert printable_value(list(range(2000))).endswith(" … (shortened)")


def test_a_problem_is_clean_however_it_is_made() -> None:
    made = ProblemError(
        ProblemKind.REWARD_FAILED, EVIL, where=EVIL, got={"a": [EVIL]}, expected=EVIL, action=EVIL
    ).problem
    fields = {"type": "urn:solrl:problem:x", "title": EVIL, "status": 500, "detail": EVIL, "got": {EVIL: EVIL}}
    received = Problem.model_validate_json(json.dumps(fields).replace(r"\ud800", ""))
    for problem in (made, received, Problem(**fields)):
        assert problem.detail.startswith(r"\x1b]0;owned")
        assert json.dumps(problem.model_dump(), ensure_ascii=False).isprintable()
        assert str(problem).isprintable()
    assert made.got == {"a": [SHOWN]}


def test_errors_and_tracebacks_are_printed_clean(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("solrl", f"first\n{EVIL}")
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "", 1, "failed", (), (ValueError, error, error.__traceback__))
    lines = [*capsys.readouterr().err.splitlines(), *PrintableFormatter().format(record).splitlines()]
    assert lines[0] == "solrl: first"
    assert all(map(str.isprintable, lines))
    assert sum("owned" in line for line in lines) == 2


def test_an_error_of_the_system_names_its_path_and_what_to_do() -> None:
    with pytest.raises(OSError, match="Errno") as failed:
        Path("/nowhere/else").read_text()
    assert error_text(failed.value).startswith("/nowhere/else: No such file or directory; check this path")
    assert error_text(ValueError("as it is")) == "as it is"


@pytest.mark.parametrize(
    ("code", "module", "text"),
    [
        ("raise RuntimeError(\n    'too few'\n)", "solrl_more", "too few"),
        ("raise RuntimeError('too few')", "torch.more", "RuntimeError: too few; SOLRL_TRACEBACK=1 shows where"),
        ("{}['base']", "solrl_more", "KeyError: 'base'; SOLRL_TRACEBACK=1 shows where"),
    ],
)
def test_an_unexpected_error_says_what_shows_its_place(tmp_path: Path, code: str, module: str, text: str) -> None:
    file = tmp_path / "more.py"
    file.write_text(code)
    with pytest.raises(Exception, match=r"too few|base") as failed:
        exec(compile(code, file, "exec"), {"__name__": module})
    assert error_text(failed.value) == text


def test_a_problem_reads_as_one_sentence_after_another() -> None:
    problem = ProblemKind.QUEUE_FULL.problem("it is full", where="body", got=3, expected="at most 2", action="wait")
    assert str(problem) == "Queue is full: it is full; at body; got 3; expected 'at most 2'; wait"
    assert str(ProblemKind.QUEUE_FULL.problem("it is full")) == "Queue is full: it is full"
    error = ProblemError(ProblemKind.OUT_OF_MEMORY, "no room", status=503, where="body.plan")
    assert (error.problem.status, error.problem.where) == (503, "body.plan")
    assert ProblemKind.OUT_OF_MEMORY.status == 507
    assert str(error) == str(error.problem)
