"""Settings in YAML: the scalars of YAML 1.2's core schema, without aliases, tags and repeated keys.

YAML 1.1, which PyYAML reads, has 010 for 8, 1:30 for 90, 2025-11-25 for a date, and 1e-2 for a text.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

LONGEST = 2**20
"""Bytes of a file, and characters of a text. A fitted plan takes some kilobytes."""
_DEEPEST = 32
_LONGEST_NUMBER = 40
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is about ten times as fast

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class YamlError(ValueError):
    """A text cannot be used; the message begins with line and column."""


@dataclass(frozen=True)
class YamlText:
    """Texts, numbers, truth values, None, lists, and mappings from texts; `lines` has each dotted key's, from 1."""

    value: Any
    lines: Mapping[str, int]


def parse_yaml(text: str) -> YamlText:
    """Parse YAML.

    Raises:
        YamlError: not YAML, or longer or deeper than settings are; or it has an alias, a tag, a number of many digits,
            or a key twice, also once dotted and once in a section.
    """
    if len(text) > LONGEST:
        raise YamlError(f"got {len(text):,} characters; expected at most {LONGEST:,}")
    reader = _Reader(yaml.parse(text, Loader=_PARSER))
    try:
        return YamlText(reader.document(), reader.lines)
    except yaml.MarkedYAMLError as error:
        raise _at(error.problem_mark, error.problem or "cannot be read") from error
    except yaml.reader.ReaderError as error:
        sign = chr(error.character) if isinstance(error.character, int) else str(error.character)
        line = text.count("\n", 0, max(text.find(sign), 0)) + 1
        raise YamlError(f"line {line}: got the character {sign!r}, which YAML does not allow") from error
    except UnicodeEncodeError as error:
        raise YamlError(f"got {error.object[error.start : error.end]!r}, which is no UTF-8") from error


def dump_yaml(value: Any, *, flow: bool = False) -> str:
    """A value as YAML that `parse_yaml` and readers of YAML 1.1 read alike."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes what either version would not read as a text, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern in (("int", _INT), ("float", _FLOAT)):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern.pattern})$"), None)


def _at(mark: Any, problem: str) -> YamlError:
    return YamlError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem)


class _Reader:
    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self.lines: dict[str, int] = {}

    def document(self) -> Any:
        next(self._events)  # the start of the stream
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        value = self._value(next(self._events), "", 0)
        next(self._events)  # the end of the document
        if not isinstance(after := next(self._events), yaml.StreamEndEvent):
            raise _at(after.start_mark, "a second document begins here; expected a single one")
        return value

    def _value(self, event: Any, prefix: str, depth: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            raise _at(event.start_mark, f"got the alias *{event.anchor}; expected the value itself, written out again")
        if event.tag is not None:
            raise _at(event.start_mark, f"got the tag {event.tag!r}; expected none: a text is a text in quotes")
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        if depth == _DEEPEST:
            raise _at(event.start_mark, f"expected at most {_DEEPEST} values inside each other")
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                items.append(self._value(event, f"{prefix}{len(items)}.", depth + 1))
            return items
        mapping: dict[str, Any] = {}
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            name = self._name(key, prefix)
            mapping[key.value] = self._value(next(self._events), f"{name}.", depth + 1)
        return mapping

    def _name(self, key: Any, prefix: str) -> str:
        """The dotted name of a key, which is a text whatever it looks like."""
        mark = key.start_mark
        if not isinstance(key, yaml.ScalarEvent) or key.tag is not None:
            raise _at(mark, "expected a name here")
        name = f"{prefix}{key.value}"
        if name in self.lines:
            raise _at(mark, f"{name} is there already, in line {self.lines[name]}; expected it once")
        self.lines[name] = mark.line + 1
        return name


def _scalar(event: Any) -> Any:
    text: str = event.value
    if not event.implicit[0]:  # in quotes
        return text
    if text in _WORDS:
        return _WORDS[text]
    number = int if _INT.fullmatch(text) else float if _FLOAT.fullmatch(text) or _NOT_FINITE.fullmatch(text) else None
    if number is None:
        return text
    if len(text) > _LONGEST_NUMBER:
        raise _at(event.start_mark, f"got a number of {len(text):,} signs; expected at most {_LONGEST_NUMBER}")
    if number is float:
        return float(text.replace(".", "") if _NOT_FINITE.fullmatch(text) else text)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
