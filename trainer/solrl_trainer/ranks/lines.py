"""Connections between ranks: each rank keeps one to rank 0, which the kernel closes when a process dies."""

import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from solrl_trainer.ranks.place import Place

Lines = dict[int, socket.socket]
"""Rank → connection: on rank 0, to every other rank; on the others, to rank 0."""

_PATIENCE = 300.0
"""Seconds in which all ranks must connect; machines may load programs at different speeds."""
_HELLO = 15.0
_LONGEST_HELLO = 256
_KEPT_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Socket options by which the kernel closes a connection after 25 s of silence, e.g. of a machine without power."""


def connect(place: Place, publish: Callable[[str], None], find: Callable[[], str]) -> Lines:
    """Connect all ranks to rank 0.

    Args:
        place: place of this process.
        publish: publishes a text of rank 0 to all ranks.
        find: waits for that text.

    Raises:
        OSError: a rank did not connect.
    """
    if place.first:
        return _accept(place, publish)
    port, token = find().split()
    line = socket.create_connection((place.address, int(port)), timeout=_PATIENCE)
    _keep_alive(line)
    send(line, {"rank": place.rank, "token": token})
    return {0: line}


def send(line: socket.socket, message: dict[str, Any]) -> None:
    """Send a JSON object.

    Raises:
        OSError: the other process has ended.
    """
    line.sendall(json.dumps(message).encode() + b"\n")


def _accept(place: Place, publish: Callable[[str], None]) -> Lines:
    lines: Lines = {}
    token, until = secrets.token_hex(16), time.monotonic() + _PATIENCE
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=place.size) as server:
        publish(f"{server.getsockname()[1]} {token}")
        while len(lines) < place.size - 1:
            server.settimeout(max(0.1, until - time.monotonic()))
            try:
                line, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, place.size)) - lines.keys())
                raise TimeoutError(f"ranks {missing} did not connect to rank 0 in {_PATIENCE:.0f} s") from None
            rank = _rank_of(line, token)
            if rank is None or rank in lines:
                line.close()
            else:
                lines[rank] = line
    return lines


def _rank_of(line: socket.socket, token: str) -> int | None:
    """The rank that connected; None if it is not a rank of this run."""
    try:
        line.settimeout(_HELLO)
        # Byte by byte: data after the greeting belongs to the next reader.
        text = bytearray()
        while not text.endswith(b"\n") and len(text) < _LONGEST_HELLO and (byte := line.recv(1)):
            text += byte
        said = json.loads(text)
        if not hmac.compare_digest(str(said["token"]), token):
            return None
        _keep_alive(line)
        return int(said["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep_alive(line: socket.socket) -> None:
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEPT_ALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
