"""Algorithms by name: built in, of an entry point, or `package.module:attribute`."""

import difflib
import importlib
from importlib.metadata import entry_points
from typing import Any

from solrl_trainer.algorithms.base import Algorithm, AlgorithmSettings

GROUP = "solrl.algorithms"
_BUILT_IN = {"diffusionnft": "solrl_trainer.algorithms.diffusionnft:DiffusionNft"}


def known_algorithms() -> list[str]:
    """Names that `find_algorithm` takes without a colon."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def find_algorithm(name: str) -> type[Algorithm[Any, Any]]:
    """The class of an algorithm.

    Raises:
        ValueError: nothing is registered under the name and it is not `package.module:attribute`, it cannot be
            imported, or it is something else.
    """
    registered = {entry.name: entry.value for entry in entry_points(group=GROUP)} | _BUILT_IN
    module, colon, attribute = registered.get(name, name).partition(":")
    if not colon:
        near = difflib.get_close_matches(name, known_algorithms(), 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"got algorithm {name!r}{hint}; expected one of {known_algorithms()}, or package.module:attribute"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"cannot load algorithm {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ValueError(f"algorithm {name!r} is {found!r}; expected a subclass of {Algorithm.__module__}.Algorithm")
    if not (isinstance(found.Settings, type) and issubclass(found.Settings, AlgorithmSettings)):
        raise ValueError(
            f"algorithm {name!r} has settings {found.Settings!r}; expected a subclass of "
            f"{Algorithm.__module__}.AlgorithmSettings"
        )
    return found
