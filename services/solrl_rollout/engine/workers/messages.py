"""Messages between processes: a JSON header and a body of bytes. Nothing is pickled."""

import contextlib
import json
import os
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

_SIZE = struct.Struct("!Q")


def encode_message(header: dict[str, Any], body: bytes) -> bytes:
    """A message as bytes."""
    text = json.dumps(header).encode()
    return b"".join((_SIZE.pack(len(text)), text, body))


def decode_message(message: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and body of a message."""
    (size,) = _SIZE.unpack_from(message)
    end = _SIZE.size + size
    return json.loads(message[_SIZE.size : end]), message[end:]


class ReceivedMessage(NamedTuple):
    """A received message. `descriptor`, if there is one, is an open file, which the receiver must close."""

    header: dict[str, Any]
    body: bytes
    descriptor: int | None = None


class Messages:
    """One end of a pair of sockets. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self._sending = threading.Lock()

    def send(self, header: dict[str, Any], body: bytes = b"", descriptor: int | None = None) -> None:
        """Send a message; `descriptor` is an open file that the other process gets, too.

        Raises:
            OSError: the other side has closed.
        """
        with self._sending:
            self._connection.send_bytes(encode_message(header | {"file": descriptor is not None}, body))
            if descriptor is not None:
                socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive(self) -> ReceivedMessage:
        """Receive the next message.

        Raises:
            ConnectionError: the other side has closed.
        """
        try:
            header, body = decode_message(self._connection.recv_bytes())
            if not header.pop("file"):
                return ReceivedMessage(header, body)
            if descriptors := socket.recv_fds(self._socket, 1, 1)[1]:
                return ReceivedMessage(header, body, descriptors[0])
            raise EOFError
        except (EOFError, OSError) as error:
            raise ConnectionError("the other side has closed the connection") from error

    def end(self) -> None:
        """End the connection. `receive` returns what has arrived, then raises."""
        with contextlib.suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and free its descriptors; what has arrived is lost."""
        self.end()
        self._socket.close()
        self._connection.close()
