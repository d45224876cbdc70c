"""Reading of stored records: a damaged one is logged and omitted, so that it does not hide others.

Unknown fields are ignored: replicas that share a store may have different versions.
"""

import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from redis.exceptions import ResponseError
from solrl_proto.adapters import AdapterInfo
from solrl_proto.identifiers import NAME_PATTERN, Message
from solrl_proto.problems import ProblemError
from solrl_proto.status import Point

from solrl_rollout.store.base import corrupt, corrupt_run

logger = logging.getLogger(__name__)

DAMAGED = object()
"""Placeholder for a value of a wrong type."""

_NUMBER = re.compile(rb"0|[1-9][0-9]{0,15}")
_NAME = re.compile(NAME_PATTERN.encode())
_POINTS: TypeAdapter[tuple[Point, ...]] = TypeAdapter(tuple[Point, ...])
_REMEMBERED = 1024
_SHOWN = 200

Model = TypeVar("Model", bound=Message)


class Record(Message):
    """A version in the run's hash: its description, and the token and number of its chunks."""

    info: AdapterInfo
    token: str
    chunks: Annotated[int, Field(ge=0, le=65536)]


class Damage:
    """Logs each damaged record once; of very many, the oldest are forgotten and logged again."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, str] = OrderedDict()

    def name(self, place: str, fault: object) -> None:
        """Log the fault of the record at `place`."""
        shown = repr(str(fault)[:_SHOWN])
        if self._named.get(place) == shown:
            return
        self._named[place] = shown
        while len(self._named) > _REMEMBERED:
            self._named.popitem(last=False)
        logger.warning("%s is damaged in the store, and omitted: %s", place, shown)

    def message(self, place: str, model: type[Model], text: Any) -> Model | None:
        """The message of a JSON record; None if it is damaged."""
        try:
            return model.model_validate_json(text, extra="ignore")
        except ValidationError as error:
            self.name(place, error)
            return None

    def points(self, run: str, texts: Sequence[bytes]) -> tuple[Point, ...]:
        """A run's iterations without damaged ones."""
        try:
            return _POINTS.validate_json(b"[" + b",".join(texts) + b"]", extra="ignore")
        except ValidationError:
            found = (self.message(f"an iteration of run {run!r}", Point, text) for text in texts)
            return tuple(point for point in found if point is not None)

    def names(self, names: Sequence[Any]) -> list[str]:
        """Valid names of runs, in order."""
        for wrong in (name for name in names if not _NAME.fullmatch(name)):
            self.name(f"the name {wrong!r} in a list of runs", f"expected {NAME_PATTERN}")
        return sorted(name.decode() for name in names if _NAME.fullmatch(name))

    def versions(self, run: str, fields: Mapping[Any, Any]) -> Iterator[AdapterInfo]:
        """The versions among the fields of a run's hash, oldest first, without damaged ones."""
        for version in numbers(fields):
            try:
                yield version_record(run, version, fields[b"%d" % version]).info
            except ProblemError as error:
                self.name(f"version {version} of run {run!r}", error.problem.got)


def number(text: Any) -> int | None:
    """The whole number in a field, of up to 16 digits; None for anything else."""
    return int(text) if isinstance(text, bytes) and _NUMBER.fullmatch(text) else None


def numbers(texts: Any) -> list[int]:
    """The whole numbers among fields, in order."""
    return sorted(found for text in texts if (found := number(text)) is not None)


def head_of(run: str, text: Any) -> int | None:
    """A run's head; None if there is none.

    Raises:
        ProblemError: 500 `adapter-corrupt`: it is not a version.
    """
    head = number(text)
    if head is None and text is not None:
        raise corrupt_run(run, got=f"head {str(text)[:_SHOWN]}", expected="a version as its head")
    return head


def version_record(run: str, version: int, text: bytes | str) -> Record:
    """A version's record.

    Raises:
        ProblemError: 500 `adapter-corrupt`: it cannot be read, or is another version's.
    """
    try:
        record = Record.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        raise corrupt(run, version, got=str(error), expected="a version record") from error
    if (record.info.run, record.info.version) != (run, version):
        got = f"the record of version {record.info.version} of run {record.info.run!r}"
        raise corrupt(run, version, got=got, expected="the version's own record")
    return record


def of_another_type(error: Exception) -> bool:
    """Whether Redis refused a command because its key has a value of another type."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


def fault_of(error: Exception) -> str:
    """The fault that an error of Redis names, without the commands of the pipeline, which may hold a whole script."""
    return str(error).rpartition("caused error: ")[2].strip("(',)")
