"""Reading of stored records: a damaged one is logged and omitted, so that it does not hide others.

Unknown fields are ignored: replicas that share a store may have different versions.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from solrl_proto.adapters import AdapterInfo
from solrl_proto.identifiers import Message
from solrl_proto.status import Point

from solrl_rollout.store.errors import CorruptError

logger = logging.getLogger(__name__)

_POINTS: TypeAdapter[tuple[Point, ...]] = TypeAdapter(tuple[Point, ...])
_SHOWN = 200

Model = TypeVar("Model", bound=Message)


@lru_cache(1024)
def log_damage(place: str, fault: str) -> None:
    """Log the fault of a damaged record; once, however often it is read."""
    logger.warning("%s is damaged in the store, and omitted: %r", place, fault[:_SHOWN])


def readable(place: str, model: type[Model], text: bytes) -> Model | None:
    """The message of a JSON record; None if it is damaged."""
    try:
        return model.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        log_damage(place, str(error))
        return None


def points_of(run: str, texts: Sequence[bytes]) -> tuple[Point, ...]:
    """A run's iterations without damaged ones."""
    try:
        return _POINTS.validate_json(b"[" + b",".join(texts) + b"]", extra="ignore")
    except ValidationError:
        found = (readable(f"an iteration of run {run!r}", Point, text) for text in texts)
        return tuple(point for point in found if point is not None)


def versions_of(run: str, fields: Mapping[bytes, bytes]) -> Iterator[AdapterInfo]:
    """The versions among the fields of a run's hash, oldest first, without damaged ones."""
    for version in numbers(fields):
        try:
            yield info_of(run, version, fields[b"%d" % version])
        except CorruptError as error:
            log_damage(f"version {version} of run {run!r}", str(error.problem.got))


def numbers(fields: Mapping[bytes, bytes]) -> list[int]:
    """The versions among the fields of a run's hash, oldest first."""
    return sorted(int(field) for field in fields if field.isdigit())


def head_of(run: str, text: bytes | None) -> int | None:
    """A run's head; None if there is none.

    Raises:
        CorruptError: it is not a version.
    """
    if not text:
        return None
    if not text.isdigit():
        raise CorruptError(run, None, got=f"head {str(text)[:_SHOWN]}", expected="a version as its head")
    return int(text)


def info_of(run: str, version: int, text: bytes) -> AdapterInfo:
    """A version's description.

    Raises:
        CorruptError: it cannot be read, or is another version's.
    """
    try:
        info = AdapterInfo.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        raise CorruptError(run, version, got=str(error), expected="a version record") from error
    if (info.run, info.version) != (run, version):
        got = f"the record of version {info.version} of run {info.run!r}"
        raise CorruptError(run, version, got=got, expected="the version's own record")
    return info
