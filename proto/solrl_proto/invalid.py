"""The problem document of a request that is not valid, made of pydantic's errors."""

from collections.abc import Mapping, Sequence
from typing import Any

from solrl_proto.identifiers import NAME_PATTERN, NAME_RULE
from solrl_proto.problems import Problem, ProblemKind

SHOWN = 200
"""Characters of a value that a problem repeats."""

_WORDS = {
    "missing": "this field",
    "extra_forbidden": "no field of this name",
    "too_short": "{min_length} or more items",
    "too_long": "at most {max_length} items",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "string_pattern_mismatch": "a text as {pattern}",
}
"""Expectations by pydantic's type of error; for other types, pydantic's own text has them."""


def invalid_request(all_errors: Sequence[Any]) -> Problem:
    """The problem of a request from pydantic's errors."""
    # pydantic also calls a tuple too short whose first item is wrong, because it stops there (`fail_fast`).
    places = {error["loc"][:depth] for error in all_errors for depth in range(len(error["loc"]))}
    errors = [error for error in all_errors if error["type"] != "too_short" or error["loc"] not in places]
    first = errors[0]
    if first["type"] == "json_invalid":
        where, *at = first["loc"] or ("request",)
        fault = first["ctx"]["error"] + (f" at character {at[0]}" if at else "")
        return ProblemKind.INVALID_REQUEST.problem(
            f"the {where} is not JSON: {fault}", where=where, expected="JSON", action="/docs describes the request"
        )
    where = ".".join(str(part) for part in first["loc"])
    faults = [f"{'.'.join(str(part) for part in e['loc'])}: {_message(e)}"[: SHOWN * 2] for e in errors[:5]]
    return ProblemKind.INVALID_REQUEST.problem(
        "; ".join(faults) + (f"; and {len(errors) - 5} more" if len(errors) > 5 else ""),
        where=where,
        got="nothing" if first["type"] == "missing" else _summary(first.get("input")),
        expected=_message(first).removeprefix("expected "),
        action="correct the field; /docs describes the request",
    )


def _message(error: Any) -> str:
    if words := _WORDS.get(error["type"]):
        return f"expected {words.format(**error.get('ctx', {}))}".replace(
            f"a text as {NAME_PATTERN}", f"a name of {NAME_RULE}"
        )
    message: str = error["msg"].removeprefix("Value error, ").replace("Input should be ", "expected ", 1)
    return message[:1].lower() + message[1:]


def _summary(value: Any) -> Any:
    """An invalid value: itself if it is short, otherwise a description."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if len(value) > 8 else [_summary(v) for v in value]
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, list(value)[:16]))}" if value else "an empty object"
    if isinstance(value, str) and len(value) > SHOWN:
        return f"{value[:SHOWN]}… ({len(value)} characters)"
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"an integer of {value.bit_length()} bits"
    return value
