"""Objects of the shapes world, and metadata that names them: GenEval's, and `size`, which GenEval does not have."""

from collections.abc import Mapping
from typing import Any

from solrl_core.rewards.geneval_rules import RELATIONS
from solrl_core.rewards.metadata import objects_of, refuse, require_one_of, require_position

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
SIZES = ("small", "large")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse metadata that does not describe a scene of the shapes world.

    Raises:
        PromptError: there is no `include` list, or an item of it is of another world.
    """
    include = objects_of(metadata, "include")
    if not include:
        refuse("metadata.include", metadata.get("include"), "a list of at least one object")
    for at, item in enumerate(include):
        where = f"metadata.include.{at}"
        require_one_of(f"{where}.color", item.get("color"), COLOURS)
        require_one_of(f"{where}.class", item["class"], SHAPES)
        if "size" in item:
            require_one_of(f"{where}.size", item["size"], SIZES)
        if "position" in item:
            require_position(f"{where}.position", item["position"], RELATIONS, at)
