"""Memory that a JSON document takes once it is parsed, estimated before that.

A parser may take a hundred times a document's size, and blocks its thread.
"""

MAX_PARSED_BYTES = 64 * 2**20
"""Limit for a request. The largest request's seeds take 40 MiB; a prompt may have 100 lists, objects and fields."""

_ITEM_BYTES = 40
_ENTRY_BYTES = 768
"""Bytes of a field, list or object. Each also costs Python's garbage collector some time."""


def parsed_bytes(document: bytes) -> int:
    """High estimate of the parsed bytes of a document's lists, objects and numbers."""
    entries = sum(map(document.count, (b"[", b"{", b":")))
    return _ITEM_BYTES * document.count(b",") + _ENTRY_BYTES * entries
