"""Proxy for Redis that parses the protocol, to kill the server at an exact place in a command."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

PLACES = ("before", "half", "sent", "executed", "answered")
"""Kill before a command is forwarded, in its middle, right after it, after its execution, or after its answer."""

Kill = Callable[[], Coroutine[Any, Any, None]]


class RedisProxy:
    """Forwards commands one by one, records their names, and kills the server at the armed place."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._kill_point: tuple[int, str, Kill] | None = None
        self._killing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.commands: list[str] = []

    async def start(self) -> str:
        """Start listening; returns the proxy's URL."""
        # `_accept` is a plain function, because asyncio logs the cancellation of a coroutine callback as an error.
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**24)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def arm(self, index: int, place: str, kill: Kill) -> None:
        """Arm the proxy to call `kill` at `place` of command `index`, counted from now."""
        self.commands.clear()
        self._kill_point = (index, place, kill)

    async def killed(self) -> bool:
        """Wait for a kill in progress; returns whether there was one."""
        if self._killing is not None:
            await self._killing
        return self._killing is not None

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        try:
            replies, upstream = await asyncio.open_connection("127.0.0.1", self._target, limit=2**24)
            while True:
                if not await self._pass_on(await read_message(reader), replies, upstream, writer):
                    return
        except (OSError, asyncio.IncompleteReadError):
            pass  # one side closed its connection
        finally:
            for one in (writer, upstream):
                if one is not None:
                    with suppress(OSError):
                        one.close()

    async def _pass_on(
        self,
        command: bytes,
        replies: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
    ) -> bool:
        """Forward one command; returns whether the connection stays open."""
        place = await self._place(command)
        if place == "before":
            return False
        upstream.write(command if place != "half" else command[: len(command) // 2])
        await upstream.drain()
        if place in ("half", "sent"):
            await self._kill()
            return False
        reply = await read_message(replies)
        if place == "executed":
            await self._kill()
            return False
        client.write(reply)
        await client.drain()
        if place == "answered":
            await self._kill()
            return False
        return True

    async def _place(self, command: bytes) -> str | None:
        name = command.split(b"\r\n", 3)[2].decode().upper()
        if name in ("HELLO", "CLIENT", "SELECT"):
            return None  # connection setup, not part of a push
        self.commands.append(name)
        if self._kill_point is None or len(self.commands) - 1 != self._kill_point[0]:
            return None
        if self._kill_point[1] == "before":
            await self._kill()
            return "before"
        return self._kill_point[1]

    async def _kill(self) -> None:
        assert self._kill_point is not None
        self._killing, self._kill_point = asyncio.ensure_future(self._kill_point[2]()), None
        await asyncio.shield(self._killing)  # closing the connection must not cancel the kill


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Read the bytes of one RESP 2 or 3 command or reply."""
    line = await reader.readuntil(b"\r\n")
    kind, rest = line[:1], line[1:-2]
    if kind in b"$=!" and rest != b"-1":
        return line + await reader.readexactly(int(rest) + 2)
    if kind in b"*%~>" and rest != b"-1":
        parts = [line]
        for _ in range(int(rest) * (2 if kind == b"%" else 1)):
            parts.append(await read_message(reader))
        return b"".join(parts)
    return line
