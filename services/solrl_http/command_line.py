"""The command line of a service: its settings from options and environment, with one line for each fault."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from importlib.metadata import version
from typing import Annotated, Any, NoReturn, TypeVar

import tyro
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError
from solrl_proto.printable import error_text, print_error
from solrl_proto.problems import ProblemError
from solrl_proto.text_files import start_in_utf8

from solrl_http.settings import HttpSettings

SettingsT = TypeVar("SettingsT", bound=BaseSettings)
HttpT = TypeVar("HttpT", bound=HttpSettings)
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


def parse_settings(defaults: HttpT, program: str, description: str, words: list[str]) -> HttpT:
    """The settings that options give, as `defaults` without one; the help shows them by `groups`, the limits last.

    Exits with 2 where the words are not understood.

    Raises:
        ValidationError: a value cannot be.
    """
    fields, listed = type(defaults).model_fields, [name for names in defaults.groups.values() for name in names]
    groups = {**defaults.groups, "limits": tuple(name for name in fields if name not in listed)}
    parts = {title: _part(title, names, defaults) for title, names in groups.items()}
    options = make_dataclass("Options", [(title, type(part)) for title, part in parts.items()])
    parsed = tyro.cli(
        options,
        default=options(**parts),
        prog=program,
        description=description,
        args=words,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return type(defaults)(**{name: getattr(getattr(parsed, title), name) for title in groups for name in groups[title]})


def _part(title: str, names: Sequence[str], defaults: BaseSettings) -> Any:
    """These of the settings, as an object whose fields are options."""
    fields = {name: type(defaults).model_fields[name] for name in names}
    annotated = [
        (name, Annotated[(field.annotation, *field.metadata, tyro.conf.arg(help=field.description))])
        for name, field in fields.items()
    ]
    return make_dataclass(title.capitalize(), annotated)(**{name: getattr(defaults, name) for name in names})


def fail(program: str, message: str) -> NoReturn:
    """Exit with 2 and the message on stderr."""
    print_error(program, message)
    sys.exit(2)


def _faults(error: ValidationError, form: str, spelling: Callable[[str], str]) -> str:
    """The faults of settings in one line: each value as it was given, and what was expected.

    Args:
        error: pydantic's error about the settings.
        form: form of a setting, such as `--{} {}`.
        spelling: name of a setting → its spelling in that form.
    """
    faults = []
    for fault in error.errors(include_url=False):
        message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
        message = re.sub("^expected (?=greater|less)", "expected a number ", message)
        got = f"got {form.format(spelling(str(fault['loc'][0])), fault['input'])}; " if fault["loc"] else ""
        faults.append(message if message.startswith("got ") else got + message)
    return "; ".join(faults)
