"""Settings of a program from its command line and environment, with one line for each fault."""

import re
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError

SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def from_environment(program: str, settings: type[SettingsT]) -> SettingsT:
    """The settings of the environment; exits with 2 and the reason if they are not valid."""
    try:
        return settings()
    except ValidationError as error:
        fail(program, f"in the environment, {_faults(error, 'SOLRL_{}={}', str.upper)}")
    except SettingsError as error:
        fail(program, f"in the environment, {error}: {error.__cause__}")


def fail_by(program: str, command: str, error: ValidationError) -> NoReturn:
    """Exit with 2 and the faults of options."""
    flag = _faults(error, "--{} {}", lambda name: name.replace("_", "-"))
    fail(program, f"{flag}; `{program} {command} --help` describes every setting")


def fail(program: str, message: str) -> NoReturn:
    """Exit with 2 and one line on stderr."""
    print(f"{program}: {message}", file=sys.stderr)
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
