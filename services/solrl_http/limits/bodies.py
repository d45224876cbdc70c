"""Request bodies, collected in memory of their own.

On malloc's heap, bodies that grow beside each other leave holes, which the process keeps. A memory mapping takes memory
only where it was written to, and gives back all of it at once.
"""

import asyncio
import contextlib
import io
import mmap
from collections.abc import Callable

from starlette.requests import Request

_FIRST_BYTES = 64 * 1024
"""Size of the mapping for a body without a length; it doubles when it is full."""
_STEP_BYTES = 1024 * 1024
"""Bytes that are copied between two turns of the event loop."""


async def read_body(request: Request, limit: int, refuse: Callable[[str], Exception]) -> bytes:
    """Read a raw body of at most `limit` bytes; raise `refuse(size)` as soon as it is known to be larger.

    Raises:
        ClientDisconnect: the connection ended before the body did.
    """
    declared = request.headers.get("content-length", "")
    length = int(declared) if declared.isdecimal() else 0
    if length > limit:
        raise refuse(f"{length} bytes")
    with _mapping(max(length, _FIRST_BYTES)) as body:
        async for part in request.stream():
            size = body.tell() + len(part)
            if size > limit:
                raise refuse(f"{size} bytes and more")
            if size > len(body):
                body.resize(max(size, 2 * len(body)))
            body.write(part)
        return await _moved(body)


def _mapping(size: int) -> mmap.mmap:
    """Memory that is private to this process; a context manager that gives it back."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # the first byte would take 2 MiB
    return memory


async def _moved(body: mmap.mmap) -> bytes:
    """Copy what was written; each step gives its memory back, so that the body is in memory once."""
    size = body.tell()
    copy = io.BytesIO(bytes(size))  # getvalue does not copy
    for start in range(0, size, _STEP_BYTES):
        if start:
            await asyncio.sleep(0)
        copy.write(body[start : min(start + _STEP_BYTES, size)])
        body.madvise(mmap.MADV_DONTNEED, start, _STEP_BYTES)
    return copy.getvalue()
