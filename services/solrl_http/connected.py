"""Work for a client that may disconnect."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Value = TypeVar("Value")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Value]) -> Value:
    """Return the result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    task, departure = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, departure}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        departure.cancel()
        await asyncio.gather(task, departure, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    # The body has been read, so the next message is the end of the connection.
    while (await receive())["type"] != "http.disconnect":
        pass
