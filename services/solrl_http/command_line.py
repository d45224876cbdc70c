"""The command line of a service: its settings from options and environment, with one line for each fault."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, make_dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, TypeVar, cast

import tyro
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError
from solrl_proto.home import with_home

from solrl_http.settings import HttpSettings

SettingsT = TypeVar("SettingsT", bound=BaseSettings)
HttpT = TypeVar("HttpT", bound=HttpSettings)
CommandT = TypeVar("CommandT")


def parse_command(
    program: str,
    description: str,
    commands: Mapping[str, type[CommandT]],
    settings: type[HttpSettings],
    arguments: list[str],
) -> CommandT:
    """The command of `arguments`; exits with status 2 if they are invalid.

    Args:
        commands: name → class. A field `settings` adds an option per setting, also read from the environment.

    Raises:
        ValueError: a setting is not valid.
    """
    defaults = from_environment(settings)
    if arguments and (command_type := commands.get(arguments[0])):
        # By the parser of this command alone: it suggests no options of other commands.
        name, summary = f"{program} {arguments[0]}", str(command_type.__doc__)
        if any(field.name == "settings" for field in fields(command_type)):  # type: ignore[arg-type]
            return command_type(parse_settings(defaults, name, summary, arguments[1:]))  # type: ignore[call-arg]
        return cast(CommandT, with_home(tyro.cli(command_type, prog=name, args=arguments[1:])))
    every: Any = reduce(or_, (Annotated[kind, tyro.conf.subcommand(name)] for name, kind in commands.items()))
    command: CommandT = tyro.cli(
        every,
        prog=program,
        description=f"{description} `--version` prints the version.",
        args=arguments if not arguments or arguments[0].startswith("-") else arguments[:1],  # --help hides the fault
    )
    return command


def from_environment(settings: type[SettingsT]) -> SettingsT:
    """The settings of the environment.

    Raises:
        ValueError: one is not valid.
    """
    try:
        return settings()
    except ValidationError as error:
        raise ValueError(f"in the environment, {_faults(error, 'SOLRL_{}={}', str.upper)}") from None
    except SettingsError as error:
        raise ValueError(f"in the environment, {error}: {error.__cause__}") from None


def parse_settings(defaults: HttpT, program: str, description: str, arguments: list[str]) -> HttpT:
    """The settings that options give, as `defaults` without one; the help shows them by `groups`, the limits last.

    Exits with 2 where the arguments are not understood.

    Raises:
        ValueError: a value is not valid.
    """
    described, listed = type(defaults).model_fields, [name for names in defaults.groups.values() for name in names]
    groups = {**defaults.groups, "limits": tuple(name for name in described if name not in listed)}
    parts = {title: _part(title, names, defaults) for title, names in groups.items()}
    options = make_dataclass("Options", [(title, type(part)) for title, part in parts.items()])
    parsed = tyro.cli(
        options,
        default=options(**parts),
        prog=program,
        description=description,
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    values = {name: getattr(getattr(parsed, title), name) for title in groups for name in groups[title]}
    try:
        return type(defaults)(**values)
    except ValidationError as error:
        flag = _faults(error, "--{} {}", lambda name: name.replace("_", "-"))
        raise ValueError(f"{flag}; `{program} --help` describes every setting") from None


def _part(title: str, names: Sequence[str], defaults: BaseSettings) -> Any:
    """These of the settings, as an object whose fields are options."""
    described = {name: type(defaults).model_fields[name] for name in names}
    annotated = [
        (name, Annotated[(field.annotation, *field.metadata, tyro.conf.arg(help=field.description))])
        for name, field in described.items()
    ]
    return make_dataclass(title.capitalize(), annotated)(**{name: getattr(defaults, name) for name in names})


def _faults(error: ValidationError, form: str, spelling: Callable[[str], str]) -> str:
    """The faults of settings in one line, each named by `form` as `--{} {}`: its value, and what was expected."""
    faults = []
    for fault in error.errors(include_url=False):
        message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
        message = re.sub("^expected (?=greater|less)", "expected a number ", message)
        got = f"got {form.format(spelling(str(fault['loc'][0])), fault['input'])}; " if fault["loc"] else ""
        faults.append(message if message.startswith("got ") else got + message)
    return "; ".join(faults)
