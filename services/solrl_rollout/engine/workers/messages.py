"""Messages between processes: a JSON header and a body of bytes, over a pair of sockets. Nothing is pickled."""

import contextlib
import json
import os
import socket
import struct
import threading
from typing import Any, NamedTuple

_SIZES = struct.Struct("!QQ")


class ReceivedMessage(NamedTuple):
    """A received message. `descriptor`, if there is one, is an open file, which the receiver must close."""

    header: dict[str, Any]
    body: bytes
    descriptor: int | None = None


class Messages:
    """One end of the connection. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, header: dict[str, Any], body: bytes = b"", descriptor: int | None = None) -> None:
        """Send a message; `descriptor` is an open file that the other process gets, too.

        Raises:
            OSError: the other side has closed.
        """
        text = json.dumps(header).encode()
        sizes = _SIZES.pack(len(text), len(body))
        with self._sending:
            if descriptor is None:
                self._socket.sendall(sizes)
            else:
                sent = socket.send_fds(self._socket, [sizes], [descriptor])
                self._socket.sendall(sizes[sent:])
            self._socket.sendall(text)
            self._socket.sendall(body)

    def receive(self) -> ReceivedMessage:
        """Receive the next message.

        Raises:
            ConnectionError: the other side has closed.
        """
        sizes, descriptor = b"", None
        while len(sizes) < _SIZES.size:
            part, descriptors, _, _ = socket.recv_fds(self._socket, _SIZES.size - len(sizes), 1)
            descriptor = descriptors[0] if descriptors else descriptor
            sizes += _not_empty(part)
        try:
            header, body = (self._read(size) for size in _SIZES.unpack(sizes))
            return ReceivedMessage(json.loads(header), body, descriptor)
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise

    def end(self) -> None:
        """End the connection. `receive` returns what has arrived, then raises."""
        with contextlib.suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and free its descriptor; what has arrived is lost."""
        self.end()
        self._socket.close()

    def _read(self, size: int) -> bytes:
        parts = bytearray(size)
        view, done = memoryview(parts), 0
        while done < size:
            received = self._socket.recv_into(view[done:])
            if not received:
                raise ConnectionError("the other side has closed the connection")
            done += received
        return bytes(parts)


def _not_empty(part: bytes) -> bytes:
    if not part:
        raise ConnectionError("the other side has closed the connection")
    return part
