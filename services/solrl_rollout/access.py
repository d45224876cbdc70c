"""Who asks."""

from dataclasses import dataclass

LOCAL_TENANT = "local"
"""Whose runs they are where access is not controlled."""


@dataclass(frozen=True)
class Caller:
    """Who sent a request. Every tenant's runs are a namespace of their own: others' names are simply not there."""

    tenant: str = LOCAL_TENANT
