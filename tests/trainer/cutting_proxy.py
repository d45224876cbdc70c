"""A TCP proxy in front of a service, which cuts answers after a number of bytes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class CuttingProxy:
    """Forwards all data. Each connection's answer is cut after the next number of `limits`; None cuts nothing."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.limits: list[int | None] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            limit = self.limits.pop(0) if self.limits else None
            service = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=_pass_on, args=(client, service, None), daemon=True).start()
            threading.Thread(target=_pass_on, args=(service, client, limit), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
    passed = 0
    try:
        while (limit is None or passed < limit) and (data := source.recv(4096 if limit is None else limit - passed)):
            sink.sendall(data)
            passed += len(data)
    except OSError:
        pass
    finally:
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_proxy(port: int) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
