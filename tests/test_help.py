"""Help of both programs: every option of every command is described, in whole sentences."""

import re
from collections.abc import Iterator

import pytest

from tests.docs.command_checks import PROGRAMS
from tests.support.typed import refused, typed

HINT = re.compile(r"\((default: .*|required|repeatable)\)$")


def helped(program: str, *words: str) -> list[str]:
    done = typed(PROGRAMS[program], *words, "--help", COLUMNS="300")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def commands(program: str, *words: str) -> Iterator[tuple[str, ...]]:
    """All commands of a program, and those within them."""
    yield (program, *words)
    for line in helped(program, *words):
        if found := re.match(r" +• (\S+)", line):
            yield from commands(program, *words, found[1])


def options(lines: list[str]) -> dict[str, str]:
    """Option or positional argument → its description, a line break within it kept."""
    found: dict[str, str] = {}
    within = name = ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if indent == 1 and not line.startswith(" -"):
            within = line.strip()
        elif within in ("options", "positional arguments") and indent == 2:
            name, _, text = line.strip().partition("  ")
            found[name] = text.strip()
        elif within in ("options", "positional arguments") and indent > 2:
            found[name] = f"{found[name]}\n{line.strip()}".strip()
    return found


ALL = [one for program in PROGRAMS for one in commands(program)]


def test_the_walk_reaches_every_command() -> None:
    names = {" ".join(one) for one in ALL}
    assert {"solrl-train run", "solrl-train runs delete", "solrl-rollout serve", "solrl-rollout token revoke"} <= names
    assert "--preset NAME" in options(helped("solrl-train", "run"))
    assert "FOLDER" in options(helped("solrl-train", "report"))


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_option_is_described(words: tuple[str, ...]) -> None:
    for name, text in options(helped(*words)).items():
        described = HINT.sub("", text).strip()
        assert described, name
        assert "None" not in name + text, name
        if name != "-h, --help":
            # A line ends where a sentence does.
            assert all(line.endswith(".") for line in described.splitlines()), (name, text)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_says_its_version_and_how_to_ask(program: str) -> None:
    done = typed(PROGRAMS[program], "--version")
    assert done.returncode == 0
    assert re.fullmatch(rf"{program} \d+\.\d+\.\S+\n", done.stdout)
    assert any("--version" in line for line in helped(program))
    assert "Unrecognized options: compere" in refused(PROGRAMS[program], "compere", "--help")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("solrl-train runn", "run, demo"),
        ("solrl-train runs lst", "list, delete"),
        ("solrl-rollout serv", "serve, check, doctor, memory, token"),
        ("solrl-rollout token creat", "create, list, revoke"),
    ],
)
def test_an_unknown_command_gets_those_that_are_known(words: str, said: str) -> None:
    program, *commands = words.split()
    done = typed(PROGRAMS[program], *commands)
    assert done.returncode == 2
    assert said in done.stderr
    assert commands[-1] in done.stderr


@pytest.mark.parametrize(
    ("words", "near", "far"),
    [("solrl-train calibrate --promts", "--prompts", "evaluate"), ("solrl-rollout serve --modle", "--model", "token")],
)
def test_a_flag_at_fault_gets_the_near_ones_of_its_command_alone(words: str, near: str, far: str) -> None:
    program, command, flag = words.split()
    done = typed(PROGRAMS[program], command, flag, "3", COLUMNS="160")
    assert done.returncode == 2
    assert done.stderr.count(near) == 1
    assert far not in done.stderr
    assert f"{program} {command} --help" in done.stderr
