"""Settings in YAML: the scalars of YAML 1.2's core schema, without aliases, tags and repeated keys.

YAML 1.1, which PyYAML reads, has 010 for 8, 1:30 for 90, 2025-11-25 for a date, and 1e-2 for a text.
"""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

LONGEST = 2**20
"""Bytes of a file, and characters of a text. A fitted plan takes some kilobytes."""
_DEEPEST = 32
_TAGS = "tag:yaml.org,2002:"

_SCALARS: dict[str, tuple[str | None, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}",
        lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
    ),
    "float": (
        r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,9})?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(re.sub(r"\.(?=[iInN])", "", text)),
    ),
    "str": (None, str),
}
"""Tag → pattern of a scalar without quotes, and its value."""


class YamlError(ValueError):
    """A text cannot be used; the message begins with its line, unless the text is too long."""


class _Loader(yaml.CSafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]


class _Dumper(yaml.SafeDumper):
    """Quotes what either version would not read as a text, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _) in _SCALARS.items():
    for _kind in (_Loader, _Dumper) if _pattern else ():
        _kind.add_implicit_resolver(_TAGS + _tag, re.compile(rf"(?:{_pattern})\Z"), None)


def parse_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """Texts, numbers, truth values, None, lists and mappings from texts; and the line of each dotted key, from 1.

    Raises:
        YamlError: not YAML, or longer or deeper than settings are; or it has an alias, a tag, or a key twice, also once
            dotted and once in a section.
    """
    if len(text) > LONGEST:
        raise YamlError(f"got {len(text):,} characters; expected at most {LONGEST:,}")
    if unprintable := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, unprintable.start()) + 1
        raise YamlError(f"line {line}: got the character {unprintable[0]!a}; expected a printable one: remove it")
    lines: dict[str, int] = {}
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if tag := getattr(event, "tag", None):
                raise _at(event.start_mark, f"got the tag {tag!r}; expected none")
            if isinstance(event, yaml.AliasEvent):
                raise _at(event.start_mark, f"got the alias *{event.anchor}; expected its value, written out again")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise _at(event.start_mark, f"got {depth} values inside each other; expected at most {_DEEPEST}")
        root = yaml.compose(text, Loader=_Loader)
        return None if root is None else _value(root, "", lines), lines
    except yaml.MarkedYAMLError as error:
        raise _at(error.problem_mark, error.problem) from error


def dump_yaml(value: Any, *, flow: bool = False) -> str:
    """A value as YAML that `parse_yaml` and readers of YAML 1.1 read alike."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return text


def _at(mark: Any, problem: str | None) -> YamlError:
    return YamlError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}")


def _value(node: yaml.Node, prefix: str, lines: dict[str, int]) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{prefix}{index}.", lines) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return _SCALARS[node.tag.removeprefix(_TAGS)][1](node.value)
    mapping = {}
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if not isinstance(key, yaml.ScalarNode):
            raise _at(key.start_mark, "expected a name here")
        if name in lines:
            raise _at(key.start_mark, f"{name} is there already, in line {lines[name]}; expected it once")
        lines[name] = key.start_mark.line + 1
        mapping[key.value] = _value(value, f"{name}.", lines)
    return mapping
