"""Names and numbers that travel in paths and messages, with the one pattern each must match."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from solrl_proto.noise import SEED_LIMIT

NAME_PATTERN = r"^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?$"
NAME_RULE = "1 to 64 of a-z 0-9 . _ -, which begins and ends with a letter or digit"
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"

RunName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A run: 1 to 64 of a-z, 0-9, dot, dash, underscore; begins and ends with a letter or digit."""

ModelName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A served model, named like a run."""

TenantName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""The owner of runs, named like a run."""

Precision = Literal["nvfp4", "fp8", "bf16"]
"""A precision that a backbone computes in."""

_MOST_UNKNOWN = 64
"""Unknown fields that are named one by one."""

Version = Annotated[int, Field(ge=0, lt=2**53)]
"""An adapter version: the number of iterations behind the behaviour policy."""

Seed = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]
"""A candidate's noise seed (exact in a JSON double)."""

Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]
"""`sha256:` and 64 lower-case hexadecimal digits."""


class Message(BaseModel):
    """Base of all messages: immutable; unknown fields are errors, except where a client reads an answer.

    The number of errors is bounded, because each takes about a kilobyte: sequences that a client sends stop at their
    first wrong item (`fail_fast`), and objects are counted first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        return _counted(value, len(cls.model_fields) + _MOST_UNKNOWN)


def at_most(entries: int) -> BeforeValidator:
    """Validator of a dict's size that runs before its entries are validated, unlike pydantic's `max_length`."""
    return BeforeValidator(lambda value: _counted(value, entries))


def _counted(value: Any, limit: int) -> Any:
    if isinstance(value, Mapping) and len(value) > limit:
        raise ValueError(f"{len(value)} entries; expected at most {limit}")
    return value
