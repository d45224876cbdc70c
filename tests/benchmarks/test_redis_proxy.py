"""The proxy parses Redis' protocol exactly; otherwise Redis would be killed at the wrong places."""

import asyncio

import pytest
from fault_trials.redis_proxy import read_message

MESSAGES = [
    b"+OK\r\n",
    b":12\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"$6\r\na\r\nb\r\n\r\n",
    b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    b"*3\r\n:1\r\n*1\r\n$0\r\n\r\n-ERR no\r\n",
    b"%1\r\n+a\r\n*2\r\n:1\r\n_\r\n",
    b"~2\r\n+a\r\n+b\r\n",
]


@pytest.mark.anyio
async def test_messages_are_separated() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(MESSAGES))
    assert [await read_message(reader) for _ in MESSAGES] == MESSAGES
