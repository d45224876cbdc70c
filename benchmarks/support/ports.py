"""Ports on loopback."""

import random
import socket

# Below those that Linux gives to outgoing connections, which may be taken between the choice and its use.
_PORTS = range(10_000, 32_768)


def free_port() -> int:
    """A loopback port that nobody uses."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
