"""Control connections: one TCP connection from each rank to rank 0, which the kernel closes when a process dies."""

import hmac
import json
import secrets
import socket
import time
from contextlib import suppress
from typing import Any, Protocol

from solrl_trainer.ranks.rank_info import RankInfo

Connections = dict[int, socket.socket]
"""Rank → connection: on rank 0, to every other rank; on the others, to rank 0."""

_KEY = "solrl/rank-0"
_TIMEOUT = 300.0
"""Seconds in which all ranks must connect; nodes may load programs at different speeds."""
_HANDSHAKE_TIMEOUT = 15.0
_PAUSE = 0.1
"""Seconds between a rank's attempts to connect."""
_LONGEST_MESSAGE = 256
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Socket options by which the kernel closes a connection after 25 s of silence, e.g. of a node without power."""


class Store(Protocol):
    """A `torch.distributed` store."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set."""


def connect(rank_info: RankInfo, store: Store) -> tuple[Connections, str]:
    """Connect every rank to rank 0.

    After `torchrun --max-restarts` restarts the ranks, the store still has the keys of the previous attempt. So a rank
    that reads the address of a dead rank 0 tries again until rank 0 confirms that all ranks are connected.

    Args:
        rank_info: rank of this process.
        store: rendezvous store of the ranks.

    Returns:
        The connections, and a token of this attempt, equal on all ranks and different from that of any other attempt.

    Raises:
        TimeoutError: not all ranks connected in time.
    """
    if rank_info.is_rank_zero:
        return _accept(rank_info, store)
    until = time.monotonic() + _TIMEOUT
    while True:
        try:
            return _connect_to_rank_zero(rank_info, store)
        except (OSError, ValueError) as error:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"rank {rank_info.rank} did not connect to rank 0 at {rank_info.address} in {_TIMEOUT:.0f} s: "
                    f"{error}; check that the node accepts TCP connections from the others on any port"
                ) from error
            time.sleep(_PAUSE)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a JSON object.

    Raises:
        OSError: the other process has ended.
    """
    connection.sendall(json.dumps(message).encode() + b"\n")


def _connect_to_rank_zero(rank_info: RankInfo, store: Store) -> tuple[Connections, str]:
    """Connect, and wait until all ranks have; OSError or ValueError if the store's address is not of this rank 0."""
    port, token = bytes(store.get(_KEY)).decode().split()
    connection = socket.create_connection((rank_info.address, int(port)), timeout=_HANDSHAKE_TIMEOUT)
    try:
        send(connection, {"rank": rank_info.rank, "token": token})
        _receive(connection, _HANDSHAKE_TIMEOUT)  # rank 0 accepts the token
        _receive(connection, _TIMEOUT)  # all ranks are connected
    except BaseException:
        connection.close()
        raise
    _keep_alive(connection)
    return {0: connection}, token


def _accept(rank_info: RankInfo, store: Store) -> tuple[Connections, str]:
    connections: Connections = {}
    token, until = secrets.token_hex(16), time.monotonic() + _TIMEOUT
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=rank_info.size) as server:
        store.set(_KEY, f"{server.getsockname()[1]} {token}")
        while len(connections) < rank_info.size - 1:
            server.settimeout(max(0.1, until - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, rank_info.size)) - connections.keys())
                raise TimeoutError(f"ranks {missing} did not connect to rank 0 in {_TIMEOUT:.0f} s") from None
            rank = _rank_of(connection, token)
            if rank is None:
                connection.close()
            else:
                connections[rank] = connection  # replaces a connection that the rank gave up
    for connection in connections.values():
        with suppress(OSError):  # a rank has died, as its listener will report
            send(connection, {"connected": len(connections)})
    return connections, token


def _rank_of(connection: socket.socket, token: str) -> int | None:
    """Rank of the process that connected; None if it is not a rank of this attempt."""
    try:
        hello = _receive(connection, _HANDSHAKE_TIMEOUT)
        if not hmac.compare_digest(str(hello["token"]), token):
            return None
        send(connection, {"rank": hello["rank"]})
        _keep_alive(connection)
        return int(hello["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _receive(connection: socket.socket, seconds: float) -> Any:
    """Receive one short JSON message, byte by byte, because data after it belongs to the next reader.

    Raises:
        OSError: the connection was closed, or nothing arrived in time.
        ValueError: not a JSON message.
    """
    connection.settimeout(seconds)
    text = bytearray()
    while not text.endswith(b"\n") and len(text) < _LONGEST_MESSAGE:
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("the connection was closed")
        text += byte
    return json.loads(text)


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
