"""What the service says of a stored adapter version."""

from typing import Annotated

from pydantic import Field

from solrl_proto.identifiers import Digest, Message, ModelName, RunName, Version

PARENT_PARAMETER = "parent"
MODEL_PARAMETER = "model"
AFTER_PARAMETER = "after"
HEAD_PARAMETER = "head"
DIGEST_HEADER = "Content-Digest"
"""RFC 9530: `sha-256=:<base64>:` over the body."""

ADAPTER_MEDIA_TYPE = "application/x-safetensors"


class AdapterInfo(Message):
    """One immutable adapter version as it is stored."""

    run: RunName
    version: Version
    parent: Version | None
    model: ModelName
    digest: Digest
    size: Annotated[int, Field(gt=0)]
    modules: Annotated[int, Field(gt=0)]
    """How many modules of the model the adapter binds."""
    rank: Annotated[int, Field(gt=0)]
    alpha: Annotated[float, Field(gt=0)]


class AdapterList(Message):
    """All versions of a run that the store holds, oldest first."""

    run: RunName
    head: Version
    pinned: tuple[Version, ...] = ()
    """Versions that stay whatever comes after them."""
    versions: tuple[AdapterInfo, ...]


class RunList(Message):
    """All runs of a tenant, by name, and what their adapters take."""

    runs: tuple[AdapterList, ...]
    size: int
    """Bytes, of all stored versions."""
    quota: int | None
    """How many bytes they may take; null where there is no bound."""
