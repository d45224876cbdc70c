"""Objects of the shapes world, and metadata that names them: GenEval's, and `size`, which GenEval does not have."""

from collections.abc import Mapping
from typing import Any

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse metadata that does not describe a scene of the shapes world.

    Raises:
        ValueError: there is no `include` list, or an item of it is of another world.
    """
    include = metadata.get("include")
    if not include or not isinstance(include, list):
        raise ValueError(f"expected metadata with an 'include' list, got {dict(metadata)!r}")
    for item in include:
        known = isinstance(item, Mapping) and item.get("color") in COLOURS and item.get("class") in SHAPES
        if not known or not isinstance(item.get("count"), int):
            raise ValueError(f"expected a count of the shapes {list(SHAPES)} in {list(COLOURS)}, got {item!r}")
