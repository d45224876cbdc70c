"""YAML of settings, in which each setting is there once."""

from typing import Any

import yaml


def load_unique(text: str) -> Any:
    """Parse YAML.

    Raises:
        yaml.YAMLError: not YAML, or a setting is there twice: as the same key, or once dotted and once in a section.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        _require_unique(root, "", {}, set())
    return yaml.safe_load(text)


def _require_unique(node: yaml.Node, prefix: str, found: dict[str, yaml.Mark], seen: set[int]) -> None:
    """Refuse a dotted name that is `found` already; `seen` has the nodes' ids, since an alias may lead in a circle."""
    if id(node) in seen or not isinstance(node, yaml.MappingNode | yaml.SequenceNode):
        return
    seen.add(id(node))
    for index, item in enumerate(node.value):
        key, value = item if isinstance(node, yaml.MappingNode) else (None, item)
        name = f"{prefix}{index if key is None else key.value}"
        if key is not None and name in found:
            raise yaml.MarkedYAMLError(
                problem=f"{name} is there already, in line {found[name].line + 1}; expected it once",
                problem_mark=key.start_mark,
            )
        if key is not None:
            found[name] = key.start_mark
        _require_unique(value, f"{name}.", found, seen)
