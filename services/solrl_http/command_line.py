"""The command line of a service: its settings from options and environment, with one line for each fault."""

import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError
from solrl_proto.printable import error_text, print_error
from solrl_proto.problems import ProblemError
from solrl_proto.text_files import start_in_utf8

SettingsT = TypeVar("SettingsT", bound=BaseSettings)
CommandT = TypeVar("CommandT")


def run_program(program: str, parse: Callable[[list[str]], CommandT], run: Callable[[CommandT], int]) -> None:
    """Run the command that the command line gives. Exits with its code, or with 2 and the reason why it failed.

    Args:
        program: the program's name.
        parse: words → command; raises ValidationError for the options of `words[0]`.
        run: runs the command; returns the exit code.
    """
    # Set before torch is imported. Otherwise OpenMP's threads spin after each operation, and on a small machine
    # service and trainer compete for cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    start_in_utf8()
    words = sys.argv[1:]
    if words == ["--version"]:
        print(f"{program} {version('solrl')}")
        return
    try:
        command = parse(words)
    except ValidationError as error:
        flag = _faults(error, "--{} {}", lambda name: name.replace("_", "-"))
        fail(program, f"{flag}; `{program} {words[0]} --help` describes every setting")
    try:
        sys.exit(run(command))
    except (ProblemError, ValueError, OSError, RuntimeError, MemoryError) as error:
        fail(program, error_text(error))


def from_environment(program: str, settings: type[SettingsT]) -> SettingsT:
    """The settings of the environment; exits with 2 and the reason if they are not valid."""
    try:
        return settings()
    except ValidationError as error:
        fail(program, f"in the environment, {_faults(error, 'SOLRL_{}={}', str.upper)}")
    except SettingsError as error:
        fail(program, f"in the environment, {error}: {error.__cause__}")


def fail(program: str, message: str) -> NoReturn:
    """Exit with 2 and the message on stderr."""
    print_error(program, message)
    sys.exit(2)


def _faults(error: ValidationError, given: str, spelled: Callable[[str], str]) -> str:
    """The faults of settings in one line: each value as it was given, and what was expected.

    Args:
        error: of the settings.
        given: form of a setting, with places for its name and value.
        spelled: name of a setting → its name there.
    """
    faults = []
    for fault in error.errors(include_url=False):
        said = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
        said = re.sub("^expected (?=greater|less)", "expected a number ", said)
        got = f"got {given.format(spelled(str(fault['loc'][0])), fault['input'])}; " if fault["loc"] else ""
        faults.append(said if said.startswith("got ") else got + said)
    return "; ".join(faults)
