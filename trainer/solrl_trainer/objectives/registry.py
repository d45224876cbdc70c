"""Objectives by name: built in, of an entry point, or `package.module:attribute`. Imports torch only to load one."""

import difflib
import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from solrl_trainer.config import DiffusionNftSettings, ObjectiveSettings

if TYPE_CHECKING:
    from solrl_trainer.objectives.base import Objective

GROUP = "solrl.objectives"
# The settings besides, so that those of a run are read without torch.
_BUILT_IN: dict[str, tuple[type[ObjectiveSettings], str]] = {
    "diffusionnft": (DiffusionNftSettings, "solrl_trainer.objectives.nft:DiffusionNft"),
}


def known_objectives() -> list[str]:
    """Names that `find_objective` takes without a colon."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def settings_class(name: str) -> type[ObjectiveSettings]:
    """The settings of an objective. Raises ValueError as `find_objective`."""
    if name in _BUILT_IN:
        return _BUILT_IN[name][0]
    found: type[ObjectiveSettings] = find_objective(name).Settings
    return found


def find_objective(name: str) -> "type[Objective[Any]]":
    """The class of an objective.

    Raises:
        ValueError: nothing is registered under the name and it is not `package.module:attribute`, it cannot be
            imported, or it is something else.
    """
    registered = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    place = _BUILT_IN[name][1] if name in _BUILT_IN else registered.get(name, name)
    module, colon, attribute = place.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, known_objectives(), 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"got objective {name!r}{hint}; expected one of {known_objectives()}, or package.module:attribute"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"cannot load objective {name!r}: {error}") from error
    from solrl_trainer.objectives.base import Objective

    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ValueError(
            f"objective {name!r} is {found!r}; expected a subclass of solrl_trainer.objectives.base.Objective"
        )
    if not (isinstance(found.Settings, type) and issubclass(found.Settings, ObjectiveSettings)):
        raise ValueError(
            f"objective {name!r} has settings {found.Settings!r}; expected a subclass of "
            "solrl_trainer.config.ObjectiveSettings"
        )
    return found
