"""Messages about stored adapter versions."""

import hashlib
from functools import cached_property
from typing import Annotated

from pydantic import Field

from solrl_proto.identifiers import Digest, Message, ModelName, RunName, Version

DIGEST_HEADER = "Content-Digest"
"""RFC 9530: `sha-256=:<base64>:` over the body."""

ADAPTER_MEDIA_TYPE = "application/x-safetensors"


class AdapterFile(bytes):
    """The bytes of an adapter file, whose digest is computed once."""

    @cached_property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self).hexdigest()}"


def adapter_digest(body: bytes) -> str:
    """`sha256:` and the hexadecimal SHA-256 of an adapter file."""
    return body.digest if isinstance(body, AdapterFile) else f"sha256:{hashlib.sha256(body).hexdigest()}"


class AdapterInfo(Message):
    """One immutable, stored adapter version."""

    run: RunName
    version: Version
    parent: Version | None
    model: ModelName
    digest: Digest
    size: Annotated[int, Field(gt=0)]
    modules: Annotated[int, Field(gt=0)]
    """Number of modules of the model that the adapter binds."""
    rank: Annotated[int, Field(gt=0)]
    alpha: Annotated[float, Field(gt=0)]


class AdapterList(Message):
    """All stored versions of a run, oldest first."""

    run: RunName
    head: Version
    versions: tuple[AdapterInfo, ...]


class RunList(Message):
    """All runs of a tenant, by name, and the size of their adapters."""

    runs: tuple[AdapterList, ...]
    size: int
    """Bytes of all stored versions."""
    quota: int | None
    """The most bytes that they may take; null for no limit."""
