"""Control connections of the ranks, in a store that may have the keys of an earlier attempt."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from solrl_trainer.ranks import connections
from solrl_trainer.ranks.connections import Connections, connect
from solrl_trainer.ranks.rank_info import RankInfo


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that fails must not wait for minutes."""
    monkeypatch.setattr(connections, "_TIMEOUT", 20.0)


class Store:
    """A store in this process; `get` waits like torch's."""

    def __init__(self, **values: str) -> None:
        self._values = values
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 30)
            return self._values[key].encode()


def connected(store: Store, size: int) -> list[tuple[Connections, str]]:
    """Connections and token of each rank; rank 0 starts last."""
    with ThreadPoolExecutor(size) as pool:
        infos = [RankInfo(rank, size, rank, "127.0.0.1", 1) for rank in range(size)]
        others = [pool.submit(connect, info, store) for info in infos[1:]]
        return [connect(infos[0], store), *(other.result(600) for other in others)]


def close(found: list[tuple[Connections, str]]) -> None:
    for own, _ in found:
        for connection in own.values():
            connection.close()


def test_every_rank_is_connected_to_rank_0() -> None:
    found = connected(Store(), 3)
    assert [set(own) for own, _ in found] == [{1, 2}, {0}, {0}]
    assert len({token for _, token in found}) == 1
    for rank in (1, 2):
        connections.send(found[rank][0][0], {"from": rank})
        with found[0][0][rank].makefile("rb") as lines:
            assert json.loads(lines.readline()) == {"from": rank}
    close(found)


def test_each_attempt_has_another_token() -> None:
    store = Store()
    first, second = connected(store, 2), connected(store, 2)
    assert first[0][1] != second[0][1] == second[1][1]
    close([*first, *second])


def test_the_address_of_a_dead_rank_0_is_tried_until_the_new_one_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = connected(Store(**{connections._KEY: f"{port} old"}), 2)
    assert [set(own) for own, _ in found] == [{1}, {0}]
    assert found[1][1] != "old"
    close(found)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"rank": 1}\n'])
def test_another_program_at_the_old_address_is_left(answer: bytes) -> None:
    """It hangs up at once, answers differently, or was a rank 0 that died before all ranks were connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            connection.sendall(answer)
            connection.close()
            store.set(connections._KEY, "1 closed")

        store = Store(**{connections._KEY: f"{server.getsockname()[1]} old"})
        threading.Thread(target=serve, daemon=True).start()
        found = connected_later(store)
    assert [set(own) for own, _ in found] == [{1}, {0}]
    close(found)


def connected_later(store: Store) -> list[tuple[Connections, str]]:
    """Two ranks; rank 0 starts after the other has left the old address."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(connect, RankInfo(1, 2, 1, "127.0.0.1", 1), store)
        with store._changed:
            assert store._changed.wait_for(lambda: store._values[connections._KEY] == "1 closed", 30)
        return [connect(RankInfo(0, 2, 0, "127.0.0.1", 1), store), other.result(600)]


def test_a_stranger_is_not_a_rank() -> None:
    store, strangers = Store(), []

    class Watched(Store):
        def set(self, key: str, value: str) -> None:
            for message in (b'{"rank": 1, "token": "guessed"}\n', b"GET / HTTP/1.1\r\n\r\n"):
                stranger = socket.create_connection(("127.0.0.1", int(value.split()[0])))
                stranger.sendall(message)
                strangers.append(stranger)
            store.set(key, value)

        def get(self, key: str) -> Any:
            return store.get(key)

    found = connected(Watched(), 2)
    assert [set(own) for own, _ in found] == [{1}, {0}]
    for stranger in strangers:
        assert closed(stranger)
    close(found)


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection without an answer."""
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_TIMEOUT", 0.2)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect to rank 0 in 0 s"):
        connect(RankInfo(0, 3, 0, "127.0.0.1", 1), Store())
    with pytest.raises(TimeoutError, match=r"rank 1 did not connect to rank 0 at 127.0.0.1 in 0 s: .*refused"):
        connect(RankInfo(1, 3, 1, "127.0.0.1", 1), Store(**{connections._KEY: "1 old"}))
