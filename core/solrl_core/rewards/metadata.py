"""Checks of a prompt's metadata, which a stranger may have written: GenEval's form, within bounds.

`where` is the field in the prompt, such as `metadata.include.0.count`. All checks raise `PromptError` with `where`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

from solrl_core.errors import PromptError

MOST_ITEMS = 16
"""Objects of a list; GenEval's prompts have at most two."""
MOST_COUNT = 16
"""Most objects of an item; GenEval's prompts have at most five, and its rules keep no more than 16 of a class."""
_SHOWN = 100
"""Characters of a value that an error repeats."""


def objects_of(metadata: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The objects that a list of the metadata names, each with a class and a count; none if it lacks the list."""
    items, where = metadata.get(name, []), f"metadata.{name}"
    if not isinstance(items, list) or len(items) > MOST_ITEMS:
        got = f"{len(items)} items" if isinstance(items, list) else items
        refuse(where, got, f'a list of at most {MOST_ITEMS} objects, such as [{{"class": "dog", "count": 1}}]')
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or not isinstance(item.get("class"), str):
            refuse(f"{where}.{index}", item, 'an object with a class, such as {"class": "dog", "count": 1}')
        count = item.get("count")
        if not _is_whole(count) or not 1 <= count <= MOST_COUNT:
            refuse(f"{where}.{index}.count", count, f"a whole number from 1 to {MOST_COUNT}")
    return items


def require_one_of(where: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is none of these texts."""
    if value not in choices:
        refuse(where, value, f"one of {list(choices)}")


def require_position(where: str, value: Any, relations: Sequence[str], at: int) -> None:
    """Refuse a position that is no relation to an object before the one at this place of its list."""
    if not (
        isinstance(value, list | tuple)
        and len(value) == 2
        and value[0] in relations
        and _is_whole(value[1])
        and 0 <= value[1] < at
    ):
        refuse(where, value, f"[RELATION, INDEX], one of {list(relations)} and the index of an earlier object")


def refuse(where: str, got: Any, expected: str) -> NoReturn:
    """Raise the error of a value that is not the expected one."""
    text = repr(got)
    short = got if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    detail = f"{where} is {'missing' if got is None else repr(short)}; expected {expected}"
    raise PromptError(detail, where=where, got="nothing" if got is None else short, expected=expected)


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
