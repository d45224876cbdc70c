"""The trainer's log, as a user sees it and as a run's folder keeps it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from solrl_proto.printable import printable

TRAINER_LOG = "trainer.log"
"""File in a run's folder with time and level of each line; a resumed run appends."""


class _Printable(logging.Formatter):
    """Formats a record as one line that a terminal may show."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        return printable(super().formatMessage(record))


class _Shown(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(self.format(record))


@contextmanager
def shown_log(show: Callable[[str], None], file: Path | None = None) -> Iterator[None]:
    """Within the block, show each line of level INFO and above that the trainer logs; write it to `file`, too."""
    display = _Shown(show)
    display.setFormatter(_Printable())
    handlers: list[logging.Handler] = [display]
    if file is not None:
        written = logging.FileHandler(file, encoding="utf-8")
        written.setFormatter(_Printable("{asctime} {levelname} {message}", style="{"))
        handlers.append(written)
    logger = logging.getLogger("solrl_trainer")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
