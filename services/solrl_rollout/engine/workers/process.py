"""A worker's process on this machine, and the socket to it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from solrl_core.adapter import Adapter

from solrl_rollout.engine.workers.encoding import Header
from solrl_rollout.engine.workers.messages import Messages
from solrl_rollout.engine.workers.remote import END_SECONDS
from solrl_rollout.engine.workers.shared_adapters import SharedAdapters


class ProcessConnection:
    """A `Connection` to a new process, which ends with this one."""

    def __init__(self, environment: Mapping[str, str], files: SharedAdapters[int], reading: threading.Lock) -> None:
        """Start the process.

        Args:
            environment: variables of its environment, in addition to this process's.
            files: adapters in shared memory.
            reading: lock of the workers that read weights.
        """
        self._files = files
        self._reading = reading
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "solrl_rollout.engine.workers.child", str(theirs.fileno())]
            # Modules are found as in this process, e.g. of rewards.
            found = {"PYTHONPATH": os.pathsep.join(sys.path)}
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **found, **environment},
                stdin=subprocess.DEVNULL,
            )
        self._messages = Messages(ours)

    def reading(self) -> threading.Lock:
        """The lock of the workers that read weights."""
        return self._reading

    def share(self, adapter: Adapter) -> int:
        """The descriptor of the adapter's file."""
        return self._files.source(adapter)

    def send(self, header: Header, body: bytes = b"", source: int | None = None) -> None:
        """Send a message; with an adapter, its file's descriptor."""
        self._messages.send(header, body, source)

    def receive(self) -> tuple[Header, bytes]:
        """Receive the next message; close the socket after the last one."""
        try:
            message = self._messages.receive()
        except BaseException:
            self._messages.close()
            raise
        return message.header, message.body

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
