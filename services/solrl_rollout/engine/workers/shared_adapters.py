"""Adapters in shared memory: encoded once by the front, mapped by each worker, without names that could remain."""

import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from solrl_core.adapter import Adapter, encode_adapter, view_adapter

Source = TypeVar("Source")

_NEWEST = 4
"""Adapters that a worker keeps; at once, it generates, scores and awaits chunks of at most three."""


class SharedAdapters(Generic[Source]):
    """The front's side: what workers read each adapter from, freed when nothing refers to the adapter any more."""

    def __init__(self, write: Callable[[bytes], Source], free: Callable[[Source], None]) -> None:
        """`write` makes the source of an encoded adapter, which `free` frees."""
        self._sources: WeakKeyDictionary[Adapter, Source] = WeakKeyDictionary()
        self._write, self._free = write, free
        self._writing = threading.Lock()

    def __len__(self) -> int:
        return len(self._sources)

    def source(self, adapter: Adapter) -> Source:
        """The source of an adapter, written once; valid as long as the caller refers to the adapter.

        Raises:
            OSError: no descriptor or no memory is left.
        """
        with self._writing:
            if adapter not in self._sources:
                self._sources[adapter] = source = self._write(encode_adapter(adapter))
                weakref.finalize(adapter, self._free, source)
            return self._sources[adapter]


def adapter_files() -> SharedAdapters[int]:
    """Adapters as open files in memory."""
    return SharedAdapters(_memory_file, os.close)


class NewestAdapters:
    """The adapters that a worker used last. A merge checks each of these objects for overflow only once."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}

    def get(self, digest: str, read: Callable[[], Adapter]) -> Adapter:
        """The adapter with this digest; calls `read` if it is not among them."""
        adapter = self._adapters.pop(digest, None) or read()
        self._adapters[digest] = adapter
        if len(self._adapters) > _NEWEST:
            del self._adapters[next(iter(self._adapters))]
        return adapter


class MappedAdapters:
    """A worker's side."""

    def __init__(self) -> None:
        self._newest = NewestAdapters()

    def map(self, digest: str, descriptor: int) -> Adapter:
        """The adapter with this digest, from its file, which is closed."""

        def read() -> Adapter:
            # A private mapping: tensors need writable memory, and nothing written would reach the file.
            return view_adapter(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))

        try:
            return self._newest.get(digest, read)
        finally:
            os.close(descriptor)


def _memory_file(body: bytes) -> int:
    """Descriptor of a file in memory, which nobody can change any more."""
    if not hasattr(os, "memfd_create"):  # not Linux
        with tempfile.TemporaryFile() as file:
            file.write(body)
            file.flush()
            return os.dup(file.fileno())
    descriptor = os.memfd_create("solrl-adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(body)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
