"""Rows of a benchmark that are made in a process of its own, whose device memory is free afterwards."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

Row = dict[str, Any]
Work = Callable[..., Iterator[Row]]


class ProcessEndedError(RuntimeError):
    """The process ended before its work did; its own traceback, if any, is on stderr."""


def rows_of(
    work: Work, *given: Any, device: str, limit: float | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Yield the rows that `work(*given)` yields in its own process.

    On a CPU, where a benchmark is only tried out, in this process.

    Args:
        work: a function of a module.
        given: its arguments.
        device: device that it uses.
        limit: seconds after which the process is killed.
        environment: variables that the process has in addition.

    Raises:
        ProcessEndedError: the work failed or took too long.
    """
    if device == "cpu":
        yield from work(*given)
        return
    context = multiprocessing.get_context("spawn")
    rows, sent = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sent, work, given))
    with patch.dict("os.environ", environment or {}):
        process.start()
    sent.close()
    stop = threading.Timer(limit or threading.TIMEOUT_MAX, process.kill)
    stop.start()
    try:
        with suppress(EOFError):
            while True:
                yield rows.recv()
        process.join()
    finally:
        stop.cancel()
        process.kill()  # only if the caller has stopped early
        process.join()
    if process.exitcode:
        raise ProcessEndedError(f"the process ended with {process.exitcode}")


def _send(sent: Connection, work: Work, given: tuple[Any, ...]) -> None:
    for row in work(*given):
        sent.send(row)
