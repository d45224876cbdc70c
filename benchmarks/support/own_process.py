"""Rows of a benchmark that are made in a process of its own, whose device memory is free afterwards.

Compiled code has caches there that are empty at first, so that compile times are real.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

Row = dict[str, Any]
Work = Callable[..., Iterator[Row]]


def rows_of(work: Work, *given: Any, device: str) -> Iterator[Row]:
    """Yield the rows that `work(*given)`, of a function of a module, yields in its own process.

    On a CPU, where a benchmark is only tried out, in this process.

    Raises:
        RuntimeError: the process ended before its work did; its own traceback, if any, is on stderr.
    """
    if device == "cpu":
        yield from work(*given)
        return
    context = multiprocessing.get_context("spawn")
    rows, sent = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sent, work, given))
    with tempfile.TemporaryDirectory() as caches:
        kept = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        with patch.dict(os.environ, kept):
            process.start()
        sent.close()
        try:
            with suppress(EOFError):
                while True:
                    yield rows.recv()
            process.join()
        finally:
            process.kill()  # only if the caller has stopped early
            process.join()
    if process.exitcode:
        raise RuntimeError(f"the process ended with {process.exitcode}")


def _send(sent: Connection, work: Work, given: tuple[Any, ...]) -> None:
    for row in work(*given):
        sent.send(row)
