"""Free ports on loopback."""

import random
import socket

# Below Linux's range for outgoing connections, which could take a port between its choice and its use.
_PORTS = range(10_000, 32_768)


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
