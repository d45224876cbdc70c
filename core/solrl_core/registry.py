"""Registries: models, families, rewards, algorithms and prompt sets by name.

A name is built in, an entry point of the registry's group, or `package.module:attribute`, which is also found in the
current folder. Objects are imported on first use, and this module does not import torch, so that names can be checked
before anything large is loaded.
"""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from solrl_core.suggestions import did_you_mean

logger = logging.getLogger(__name__)
T = TypeVar("T")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(eq=False)
class Registry(Generic[T]):
    """Objects of one kind, found by name.

    Attributes:
        noun: name of the kind in errors, such as "reward".
        group: group of entry points.
        built_in: name → "package.module:attribute"; takes precedence over an entry point of the same name.
        wrong: describes the expected object if an object is of the wrong kind; None if it is right.
        others: alternatives to registered names, for errors. Without "package.module:attribute", only registered names
            are imported.
    """

    noun: str
    group: str
    built_in: Mapping[str, str] = field(default_factory=dict)
    _: KW_ONLY
    wrong: Callable[[Any], str | None] = lambda target: None
    others: tuple[str, ...] = ("package.module:attribute",)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted({*self.built_in, *_entry_points(self.group, tuple(sys.path))})

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def check(self, name: str) -> None:
        """Import nothing; raise the ValueError of `find` if `name` is neither registered nor a path to import."""
        module, _, attribute = name.partition(":")
        is_path = "package.module:attribute" in self.others and attribute and not module.endswith(".py")
        if name in self or is_path:
            return
        expected = ", ".join([f"one of {self.names()}", *self.others[:-1]])
        raise ValueError(
            f"got {self.noun} {name!r}{did_you_mean(name, self.names())}; expected {expected}, or {self.others[-1]}"
        )

    def find(self, name: str) -> T:
        """Import the object called `name`.

        Raises:
            ValueError: it is not registered, cannot be imported, or is of the wrong kind.
        """
        self.check(name)
        entry = None if name in self.built_in else _entry_points(self.group, tuple(sys.path)).get(name)
        place = f"{self.noun} {name!r}" + (f" ({entry.value}, entry point of {entry.group})" if entry else "")
        try:
            target: T = entry.load() if entry else _imported(self.built_in.get(name, name))
        except Exception as error:
            raise ValueError(f"cannot load {place}: {error}") from error
        if expected := self.wrong(target):
            raise ValueError(f"{place} is {target!r}; expected {expected}")
        return target

    def check_options(self, name: str, options: Mapping[str, Any], *, all_given: bool = True) -> None:
        """Import `name`, and check that it takes these options, if `all_given` with every option without a default.

        Raises:
            ValueError: `name` is not registered, cannot be imported, or is of the wrong kind; an option is unknown or
                lacking; it is a number where the default is true or false; or the other way round.
        """
        target: Any = self.find(name)
        names = set(options)
        if not isinstance(target, type):
            if names:
                raise ValueError(
                    f"got options {sorted(names)} for {self.noun} {name!r}, a function; expected none, or a class "
                    f"whose `__init__` takes them (docs/extending/{self.noun}.md#a-class)"
                )
            return
        parameters = inspect.signature(target).parameters.values()
        accepted = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
        unknown = sorted(names - set(accepted))
        if unknown and not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            hint = did_you_mean(unknown[0], accepted)
            raise ValueError(f"got option {unknown[0]!r} of {self.noun} {name!r}{hint}; expected some of {accepted}")
        for option, default in ((parameter.name, parameter.default) for parameter in parameters):
            kind, value = type(default), options.get(option, default)
            if kind in (bool, int, float) and isinstance(value, bool) != (kind is bool):
                expected = "true or false" if kind is bool else "a number"
                raise ValueError(f"got {value!r} for option {option!r} of {self.noun} {name!r}; expected {expected}")
        required = [p.name for p in parameters if p.kind in _BY_NAME and p.default is p.empty]
        if all_given and (lacking := [option for option in required if option not in names]):
            raise ValueError(f"{self.noun} {name!r} lacks its options {lacking}; got {sorted(names)}")

    def make(self, name: str, options: Mapping[str, Any]) -> Any:
        """Find `name`; construct it with `options` if it is a class. Other objects take no options.

        Raises:
            ValueError: `name` is not registered, cannot be imported, or is of the wrong kind; an option is unknown,
                lacking or invalid.
            OSError: files named in the options are missing.
        """
        self.check_options(name, options)
        target: Any = self.find(name)
        if not isinstance(target, type):
            return target
        try:
            return target(**options)
        except TypeError as error:
            raise ValueError(f"cannot load {self.noun} {name!r} with options {sorted(options)}: {error}") from error
        except (ValueError, OSError) as error:
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(f"cannot load {self.noun} {name!r}: {error}") from error


class FolderRegistry(Registry[Callable[[], str | Path]]):
    """Folders found by name. The registered objects are functions that return a folder."""

    def locate(self, name: str, accepted: Callable[[str], bool] = lambda name: Path(name).is_dir()) -> str:
        """Folder registered as `name`; or `name` itself if it is `accepted` (by default: if it is a folder).

        A folder of the same name is meant only by its path, such as ./NAME; the log warns once if such a folder exists.

        Raises:
            ValueError: `name` is neither registered nor accepted, or the registered function cannot be imported.
        """
        if name not in self and accepted(name):
            return name
        if name in self and Path(name).is_dir():
            _say_hidden(self.noun, name)
        return str(self.find(name)())


@cache
def _say_hidden(noun: str, name: str) -> None:
    logger.warning(f"{noun} {name}: the registered name is used, not the folder {name} here; for that, write ./{name}")


@cache
def _entry_points(group: str, folders: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Entry points of a group by name; of two with the same name, that of the earlier folder of `sys.path`.

    Reading all installed packages takes milliseconds, and a configuration checks many names.
    """
    return {entry.name: entry for entry in reversed(tuple(entry_points(group=group)))}


def _imported(path: str) -> Any:
    """The object of a `package.module:attribute`; its package may lie in the current folder."""
    name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        package, folder = name.partition(".")[0], Path.cwd()
        if error.name != package:
            raise
        if not (folder / package).is_dir() and not (folder / f"{package}.py").is_file():
            hint = did_you_mean(package, [path.stem for path in folder.glob("*.py")])
            raise ValueError(
                f"there is no module {package!r}{hint}; expected it among the installed packages, in a folder of "
                f"PYTHONPATH, or in the current folder {folder}"
            ) from error
        # `python -m` looks in the current folder, a console script does not. Last, so that it hides nothing installed.
        sys.path.append(str(folder))
        module = importlib.import_module(name)
    if not hasattr(module, attribute):
        raise ValueError(f"{name} has no attribute {attribute!r}{did_you_mean(attribute, vars(module))}")
    return getattr(module, attribute)
