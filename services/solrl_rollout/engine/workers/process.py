"""A worker's process on this machine, and the socket to it."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from io import BufferedWriter
from multiprocessing.connection import Connection

from solrl_rollout.engine.work import LeasedAdapter
from solrl_rollout.engine.workers.encoding import Header, decode_message, encode_message
from solrl_rollout.engine.workers.remote import END_SECONDS, SharedAdapters


class Messages:
    """One end of a pair of sockets. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self._sending = threading.Lock()

    def send(self, header: Header, body: bytes = b"") -> None:
        """Send a message.

        Raises:
            OSError: the other side has closed.
        """
        with self._sending:
            self._connection.send_bytes(encode_message(header, body))

    def receive(self) -> tuple[Header, bytes]:
        try:
            return decode_message(self._connection.recv_bytes())
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


class ProcessConnection:
    """A `Connection` to a new process, which ends with this one."""

    def __init__(self, environment: Mapping[str, str], files: SharedAdapters[BufferedWriter]) -> None:
        """Start the process; `environment` are variables in addition to this process's."""
        self._files = files
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "solrl_rollout.engine.workers.child", str(theirs.fileno())]
            # Modules are found as in this process, e.g. of rewards.
            module_path = {"PYTHONPATH": os.pathsep.join(sys.path)}
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **module_path, **environment},
                stdin=subprocess.DEVNULL,
            )
        self._messages = Messages(ours)

    def publish(self, adapter: LeasedAdapter) -> str:
        """The path of the adapter's file for the process."""
        return f"/proc/{os.getpid()}/fd/{self._files.source(adapter).fileno()}"

    def send(self, header: Header, source: str | None = None) -> None:
        self._messages.send(header if source is None else {**header, "source": source})

    def receive(self) -> tuple[Header, bytes]:
        """Receive the next message; close the socket after the last one."""
        try:
            return self._messages.receive()
        except BaseException:
            self._messages.close()
            raise

    def kill(self) -> None:
        """Kill the process, and end both directions of the socket: a process stuck in a driver may live on."""
        self.process.kill()
        self._messages.end()

    def close(self) -> str:
        """End both directions of the socket and wait for the end of the process, for some time."""
        self._messages.end()
        for end in (self.process.kill, lambda: None):
            try:
                code = self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                end()
            else:
                return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"process {self.process.pid} does not end when it is killed, as if stuck in a driver"


def memory_file(body: bytes) -> BufferedWriter:
    """A sealed file in memory, closed when nothing refers to it."""
    file = os.fdopen(os.memfd_create("solrl-adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb")
    try:
        file.write(body)
        file.flush()
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        file.close()
        raise
    return file
